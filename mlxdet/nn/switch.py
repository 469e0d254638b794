"""The routed layers of mlx-lm (mixtures of experts) with gradients in a fixed order.

mlx-lm multiplies tokens with the matrix of their expert by `gather_mm`. Its gradients are float scatters unless indices
are sorted and every token is given once per expert it goes to. mlx-lm sorts only from 64 indices on, and even then it
fetches tokens by `x[order // M]`, and biases by `bias[indices]`, whose gradients are scatters too. The classes here are
mixed into mlx-lm's (see `replace`): they sort and copy first, then run mlx-lm's own code. What is left in the gradient
is permutations, a sum over the M copies, and one product per expert.
"""

from typing import Any

import mlx.core as mx

from mlxdet.nn.embedding import Rows


def with_rows(module: Any, *tables: str) -> Any:
    """Return a shallow copy of `module` in which the named arrays, where it has them, look up rows by `lookup`."""
    copy: Any = type(module).__new__(type(module))  # type: ignore[call-overload]
    dict.update(copy, module)
    vars(copy).update(vars(module))
    for name in tables:
        if isinstance(module.get(name), mx.array):
            dict.__setitem__(copy, name, Rows(module[name]))
    return copy


class SwitchLinear:
    """Mixed into SwitchLinear, QuantizedSwitchLinear and LoRASwitchLinear."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., rows, in), indices (...), broadcast against each other -> (..., rows, out)."""
        batch = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        x = mx.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        chosen = mx.stop_gradient(mx.broadcast_to(indices, batch).reshape(-1))
        order = None if sorted_indices else mx.argsort(chosen)
        if order is not None:
            x, chosen = x[order], chosen[order]
        y = super(SwitchLinear, with_rows(self, "bias")).__call__(x, chosen, sorted_indices=True)  # type: ignore[misc]
        if order is not None:
            y = y[mx.argsort(order)]
        return y.reshape(*batch, *y.shape[-2:])


def gather_sort(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """mlx-lm's `_gather_sort`: tokens x (..., 1, 1, D) once per expert, in the order of experts; indices (..., M).

    The gradient of a broadcast is a sum over the copies; that of a permutation meets no row twice.
    """
    each = x.reshape(-1, 1, *x.shape[-2:])
    copies = mx.broadcast_to(each, (each.shape[0], indices.shape[-1], *x.shape[-2:])).reshape(-1, *x.shape[-2:])
    chosen = indices.reshape(-1)
    order = mx.argsort(chosen)
    return copies[order], chosen[order], mx.argsort(order)
