"""`mlx.nn.Conv1d`, `Conv2d` and `Conv3d` as one matrix product per group, for CUDA.

On CUDA MLX leaves convolutions, and their gradients, to an engine that cuDNN picks, and does not exclude those that add
with atomics. Here the windows are laid out by strided slices, one per tap of the kernel, and multiplied with the
weights. The gradient of a slice writes each element once; that of the product is two products.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import mlx.core as mx
import mlx.nn


def conv(
    x: mx.array,
    weight: mx.array,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> mx.array:
    """x (N, *spatial, C), weight (O, *kernel, C / groups) -> (N, *spatial', O): `mx.conv_general` without flips."""
    kernel = weight.shape[1:-1]
    steps, pads, gaps = ([v] * len(kernel) if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    x = mx.pad(x, [(0, 0), *((p, p) for p in pads), (0, 0)])
    spans = [g * (k - 1) + 1 for g, k in zip(gaps, kernel, strict=True)]
    out = [(n - span) // s + 1 for n, span, s in zip(x.shape[1:-1], spans, steps, strict=True)]
    if min(out) < 1:
        raise ValueError(f"an input of {x.shape[1:-1]}, padding included, is smaller than the kernel's span {spans}")
    taps = []
    for at in product(*map(range, kernel)):
        begin = [a * g for a, g in zip(at, gaps, strict=True)]
        places = (slice(b, b + (o - 1) * s + 1, s) for b, o, s in zip(begin, out, steps, strict=True))
        taps.append(x[(slice(None), *places)])
    # (positions, taps, groups, C / groups) -> (groups, positions, taps * C / groups)
    windows = mx.stack(taps, axis=-2).reshape(x.shape[0] * prod(out), len(taps), groups, -1)
    windows = windows.transpose(2, 0, 1, 3).flatten(2)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1).swapaxes(1, 2)
    return (windows @ kernels).swapaxes(0, 1).reshape(x.shape[0], *out, weight.shape[0])


class _Conv:
    """What the three have in common, in front of MLX's class."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (N, *spatial, C) -> (N, *spatial', O)."""
        y = conv(x, self.weight, self.stride, self.padding, self.dilation, getattr(self, "groups", 1))  # type: ignore[attr-defined]
        return y + self["bias"] if "bias" in self else y  # type: ignore[operator,index]


class Conv1d(_Conv, mlx.nn.Conv1d):
    """`mlx.nn.Conv1d` without cuDNN."""


class Conv2d(_Conv, mlx.nn.Conv2d):
    """`mlx.nn.Conv2d` without cuDNN."""


class Conv3d(_Conv, mlx.nn.Conv3d):
    """`mlx.nn.Conv3d` without cuDNN."""
