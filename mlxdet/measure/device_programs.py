"""The audit's example programs at sizes at which a race has room to show on a GPU.

The examples are as small as a trace allows: a thousand threads, which a GPU may well run in one order for ever. Float
atomics change bits when several thousand threads, in more blocks than the device has cores, meet at one address: here
8,192 rows of 64 go to 4 destinations, 2,048 updates each, in half a million threads. A race in shared memory needs many
blocks of many warps. Programs that are safe get the same sizes as the leaking ones they are close to.

The functions are those of the examples; where one has its size in its code, it is written anew here.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxdet.auditing.examples import Example, _gradient, _ids, _normal

Program = tuple[Callable[..., Any], tuple[Any, ...]]

ROWS, WIDTH = 8192, 64
FEW = 1024  # updates where each one is a compare-and-swap loop: under contention those are slow
WIDE = 1 << 14  # columns where a destination gets only two or three updates


def program(example: Example, large: bool) -> Program:
    """Return (fn, args) of an example, at its own size or at the one for a GPU."""
    if not large:
        return example.make()
    if example.name in OTHER:
        return OTHER[example.name]()
    return example.make()[0], ARGUMENTS[example.name]()


def _table(dtype: Any = mx.float32) -> Any:
    return _normal(1, 8, WIDTH, dtype=dtype)


def _many(high: int = 4) -> Any:
    return _ids(high=high, shape=(ROWS,))


def _experts(n: int, order: Callable[[Any], Any] = lambda ids: ids) -> tuple[Any, ...]:
    return _normal(1, 4, 32, 32), _normal(2, n, 1, 32), order(_ids(shape=(n,)))


def _delta() -> tuple[Any, ...]:
    q, k, v = (_normal(i, 2, 128, 4, 128) * 0.1 for i in range(3))
    return q, k, v, mx.sigmoid(_normal(3, 2, 128, 4)), mx.sigmoid(_normal(4, 2, 128, 4))


def _heads(dtype: Any, length: int = 1024) -> tuple[Any, ...]:
    return tuple(_normal(i, 4, 8, length, 64, dtype=dtype) for i in range(3))


def _norm(rows: int, width: int) -> tuple[Any, ...]:
    return _normal(1, rows, width), _normal(2, width), _normal(3, width)


def _rms(rows: int, width: int) -> tuple[Any, ...]:
    return _normal(2, width), _normal(1, rows, width)


# The arguments of an example's own function.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding_gradient": lambda: (_table(), _many()),
    "embedding_gradient_bfloat16": lambda: (_table(mx.bfloat16), _ids(shape=(FEW,))),
    "add_at": lambda: (mx.zeros((8, WIDTH)), _many(), _normal(2, ROWS, WIDTH)),
    "multiply_at": lambda: (mx.ones((8, WIDTH)), _ids(shape=(FEW,)), 1 + 0.1 * _normal(2, FEW, WIDTH)),
    "mixture_gradient_unsorted": lambda: _experts(2048),
    "add_at_integers": lambda: (
        mx.zeros((8, WIDTH), mx.int32), _many(), mx.random.randint(-9, 9, (ROWS, WIDTH), key=mx.random.key(2))),
    "maximum_at": lambda: (mx.zeros((8, WIDTH)), _many(), _normal(2, ROWS, WIDTH)),
    "gradient_by_permutation": lambda: (_normal(1, ROWS, WIDTH), _normal(2, ROWS)),
    "three_of_each_row": lambda: (_normal(1, ROWS, WIDTH), _normal(2, 3 * ROWS)),
    "two_of_each_row": lambda: (_normal(1, ROWS, WIDTH), _normal(2, 2 * ROWS)),
    "gradient_by_unique_ids": lambda: (_normal(1, ROWS, WIDTH), mx.argsort(_normal(2, ROWS))),
    "mixture_gradient_sorted": lambda: _experts(2048, mx.sort),
    "embedding_gradient_one_hot": lambda: (_many(), _normal(1, ROWS, WIDTH)),
    "embedding_gradient_fixed_point": lambda: (_many(), _normal(1, ROWS, WIDTH)),
    "take_along_axis_gradient": lambda: (_table(), _ids(shape=(ROWS, WIDTH))),
    "cumulative_maximum_gradient": lambda: (
        mx.broadcast_to(-mx.arange(ROWS).astype(mx.float32)[:, None], (ROWS, WIDTH)),),
    "cross_entropy_gradient": lambda: (_normal(1, ROWS, 256), _many(256)),
    "take_along_axis_permutation_gradient": lambda: (_normal(1, ROWS, WIDTH), _normal(2, ROWS, WIDTH)),
    "assign_at": lambda: (mx.zeros((8, WIDTH)), _many(), _normal(2, ROWS, WIDTH)),
    "put_along_axis": lambda: (mx.zeros((8, WIDTH)), _ids(shape=(ROWS, WIDTH)), _normal(2, ROWS, WIDTH)),
    "assign_constant": lambda: (mx.zeros((8, WIDTH)), _many()),
    "sort_gradient": lambda: (_normal(1, ROWS, WIDTH),),
    "gated_delta_gradient": _delta,
    "gated_delta_forward": _delta,
    "attention_gradient_bfloat16": lambda: _heads(mx.bfloat16),
    "attention_gradient_float32": lambda: _heads(mx.float32),
    "attention_gradient_odd_length": lambda: _heads(mx.bfloat16, 1000),
    "attention_forward_bfloat16": lambda: _heads(mx.bfloat16),
    "plain_attention_gradient_bfloat16": lambda: _heads(mx.bfloat16),
    "layer_norm_wide": lambda: _norm(ROWS, 1024),
    "layer_norm_narrow": lambda: _norm(ROWS, 128),
    "plain_layer_norm_gradient": lambda: _norm(ROWS, 1024),
    "rms_norm_gradient": lambda: _rms(2 * ROWS, 1024),
    "rms_norm_forward": lambda: _rms(2 * ROWS, 1024),
    "rms_norm_gradient_other_width": lambda: _rms(2 * ROWS, 384),
    "convolution_gradient": lambda: (_normal(1, 16, 32, 32, 64), _normal(2, 128, 3, 3, 64)),
    "unfolded_convolution_gradient": lambda: (_normal(1, 16, 900, 36), _normal(2, 36, 128)),
}  # fmt: skip


def _three_updates() -> Program:
    return lambda ids, y: mx.zeros((2, WIDE)).at[ids].add(y), (mx.array([0, 0, 0]), _normal(2, 3, WIDE))


def _two_updates() -> Program:
    return lambda ids, y: mx.zeros((2, WIDE)).at[ids].add(y), (mx.array([0, 0]), _normal(2, 2, WIDE))


def _mixture_both_sides() -> Program:
    def multiply(w: Any, x: Any, ids: Any) -> Any:
        return mx.gather_mm(x, w, mx.arange(ids.size), ids, sorted_indices=True)

    return _gradient(multiply), _experts(2048, mx.sort)


def _pooling_overlapping() -> Program:
    return _gradient(lambda x: mx.as_strided(x, (ROWS, WIDTH), (1, 1), 0)), (_normal(1, ROWS + WIDTH - 1),)


def _pooling_apart() -> Program:
    rows = FEW  # the audit computes up to 65,536 places
    return _gradient(lambda x: mx.as_strided(x, (rows, WIDTH), (WIDTH, 1), 0)), (_normal(1, rows * WIDTH),)


def _by_range() -> Program:
    return _gradient(lambda w: w[mx.arange(ROWS)]), (_normal(1, ROWS, WIDTH),)


OTHER: dict[str, Callable[[], Program]] = {
    "three_updates": _three_updates,
    "two_updates_on_zeros": _two_updates,
    "mixture_gradient_sorted_both_sides": _mixture_both_sides,
    "pooling_gradient_overlapping": _pooling_overlapping,
    "pooling_gradient_apart": _pooling_apart,
    "gradient_by_range": _by_range,
}
