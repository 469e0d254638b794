"""Rows of a table by index, differentiable without a float addition whose order is left to the hardware.

The gradient of MLX's own `table[ids]` is a scatter: every occurrence of an id adds to its row with a float atomic. Here
the lookup is written so that autodiff itself turns it into sums in a fixed order (a custom gradient would hide the step
from tracing, and with it from `mlxdet.audit`):

1. Sort the ids; equal ones form segments. Fetch each used row once, to the head of its segment. Row numbers in this
   gather are distinct (a slice of an argsort), so that in its gradient no two additions meet.
2. Spread the head over its segment by doubling: positions 1; 2, 3; 4 to 7; ... copy from those before. The gradient
   runs these copies backwards: addends of a row are summed in a binomial tree over the occurrences of the id.
3. Undo the sort: a permutation, again with distinct indices.

Values are copied, never computed with, so the result has the bits of `table[ids]`, infinities and NaN included. There
is no matrix product, so no setting of TF32 changes it. Half precision is summed in float32 and rounded once. A
gradient that is not finite reaches other rows too, as MLX differentiates a choice by multiplying with zero. Cost: a few
sorts of N integers, one of V, and ceil(log2 N) elementwise passes over (N, D), forward and backward each.
"""

from typing import Any

import mlx.core as mx
import mlx.nn

HALF = (mx.float16, mx.bfloat16)


def lookup(table: mx.array, ids: mx.array) -> mx.array:
    """Return table[ids] for a table of shape (V, ...) and integer ids of any shape, counted from the end if negative.

    An id outside -V .. V-1 gives an arbitrary row (in MLX, arbitrary memory). Not for `mx.compile(shapeless=True)`.
    """
    ids = mx.array(ids)
    if not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(f"row numbers must be integers, not {ids.dtype}")
    if ids.size < 2:
        return table[ids]
    rows = _distinct_heads(table.reshape(table.shape[0], -1), ids.reshape(-1))
    return rows.reshape(*ids.shape, *table.shape[1:])


def _distinct_heads(table: mx.array, ids: mx.array) -> mx.array:
    """table (V, D), ids (N,) with N >= 2 -> (N, D)."""
    vocab, n = table.shape[0], ids.size
    ids = mx.stop_gradient(ids.astype(mx.int32))
    ids = mx.where(ids < 0, ids + vocab, ids)
    place, every = mx.arange(n), mx.arange(vocab)
    order = mx.argsort(ids)
    arranged = ids[order]
    is_head = mx.concatenate([mx.array([True]), arranged[1:] != arranged[:-1]])
    offset = place - mx.cummax(mx.where(is_head, place, 0))  # 0, 1, 2, ... within each segment
    # The used rows in ascending order, one per segment; then unused ones, so that all N are distinct.
    count = mx.zeros((vocab,), mx.int32).at[mx.clip(ids, 0, vocab - 1)].add(1)
    used_first = mx.argsort(mx.where(count > 0, every, every + vocab))[:n]
    x = table[used_first]
    if x.dtype in HALF:
        x = x.astype(mx.float32)
    if vocab < n:
        x = mx.concatenate([x, mx.zeros((n - vocab, x.shape[1]), x.dtype)])
    # From "one per segment" to the heads' places. What lands elsewhere is overwritten below.
    heads_first = mx.argsort(mx.where(is_head, place, place + n))
    x = x[mx.argsort(heads_first)]
    k = 1
    while k < n:
        tail = offset[k:, None]
        x = mx.concatenate([x[:k], mx.where((tail >= k) & (tail < 2 * k), x[:-k], x[k:])])
        k *= 2
    return x[mx.argsort(order)].astype(table.dtype)


class Rows:
    """Stands in for a table inside a module's own code: `rows[ids]` is `lookup(table, ids)`."""

    def __init__(self, table: mx.array):
        self.table = table

    def __getitem__(self, ids: mx.array) -> mx.array:
        return lookup(self.table, ids)


class Embedding(mlx.nn.Embedding):
    """`mlx.nn.Embedding` with a repeatable gradient: same constructor, parameters, values and methods."""

    def __call__(self, x: Any) -> mx.array:
        """ids of any shape -> (*ids.shape, dims), in the dtype of the weight."""
        return lookup(self.weight, x)
