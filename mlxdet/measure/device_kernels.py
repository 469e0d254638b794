"""Every deterministic kernel of mlxdet with what it should give: values and gradients from numpy in float64.

References are written by the textbook and share no code with the kernels. Inputs are rounded to the kernel's dtype
first, so that what is left is the kernel's own error: the largest difference, relative to the largest value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np

from mlxdet.backends.cuda import norms
from mlxdet.backends.cuda.attention import attention
from mlxdet.model import embedding
from mlxdet.nn import lookup, switch

EPS = 1e-5
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
# The largest error allowed: sums of thousands of float32 addends in a fixed order; a few roundings to 8 bits.
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
Reference = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Kernel:
    """`make(large)` -> (fn, arguments, the float64 arrays that fn(*arguments) should be, named by `outputs`)."""

    name: str
    outputs: tuple[str, ...]
    limit: float
    make: Callable[[bool], tuple[Callable[..., Any], tuple[Any, ...], Reference]]


def wide(x: Any) -> np.ndarray:
    """Return an array as float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def worst(outputs: Sequence[Any], reference: Reference, names: Sequence[str]) -> tuple[float, str]:
    """Return the largest relative error and the output that has it; infinity if an output is not finite."""
    found = []
    for got, want, name in zip(outputs, reference, names, strict=True):
        if tuple(got.shape) != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, not {want.shape}")
        error = float(np.abs(wide(got) - want).max() / np.abs(want).max())
        found.append((error if np.isfinite(error) else float("inf"), name))
    return max(found)


def kernels(cpu: bool = False) -> list[Kernel]:
    """Return all of them for a GPU. On a CPU MLX's own scatter adds in order, and gather_mm has no half precision."""
    found = []
    for dtype in DTYPES:
        methods = [("onehot", 256), ("fixedpoint", 256), ("fixedpoint", 32_000), ("doubling", 256)]
        for method, vocab in [*methods, ("scatter", 256)] if cpu else methods:
            found.append(_kernel(f"segment_sum {method}, {vocab}", dtype, ("sum",), _segments, method, vocab))
        affine = ("value", "gradient of x", "gradient of weight", "gradient of bias")
        found.append(_kernel("layer_norm", dtype, affine, _norm, True))
        found.append(_kernel("rms_norm", dtype, affine[:3], _norm, False))
        gradients = ("value", "gradient of q", "gradient of k", "gradient of v")
        found.append(_kernel("attention, causal", dtype, gradients, _attention, False))
        found.append(_kernel("attention, packed rows", dtype, gradients, _attention, True))
        found.append(_kernel("embedding lookup", dtype, ("value", "gradient of weight"), _lookup))
        if dtype == "float32" or not cpu:
            found.append(_kernel("routed layer", dtype, affine[:3], _routed))
            found.append(_kernel("tokens sorted by expert", dtype, affine[:3], _sorted_tokens))
    return found


def _kernel(name: str, dtype: str, outputs: tuple[str, ...], make: Any, *options: Any) -> Kernel:
    # The segment sums add in float32 whatever they are given.
    limit = LIMITS["float32" if make is _segments else dtype]
    return Kernel(f"{name}, {dtype}", outputs, limit, lambda large: make(large, DTYPES[dtype], *options))


def _normal(rng: np.random.Generator, dtype: Any, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Any:
    return mx.array((mean + scale * rng.standard_normal(shape)).astype(np.float32)).astype(dtype)


def _with_gradients(fn: Callable[..., Any], cotangent: Any, n: int) -> Callable[..., Any]:
    """Return a function of fn's arguments: its value and the gradients of sum(value * cotangent) by the first n."""

    def loss(*args: Any) -> Any:
        y = fn(*args)
        return (y.astype(mx.float32) * cotangent).sum(), y

    def both(*args: Any) -> Any:
        (_, y), gradients = mx.value_and_grad(loss, argnums=tuple(range(n)))(*args)
        return (y, *gradients) if n > 1 else (y, gradients)

    return both


def _zipf(rng: np.random.Generator, vocab: int, n: int) -> np.ndarray:
    """Ids as a text has them: a few very often, most hardly ever."""
    p = 1.0 / np.arange(1, vocab + 1)
    return rng.choice(vocab, n, p=p / p.sum()).astype(np.int32)


def _sum_by_id(ids: np.ndarray, rows: np.ndarray, vocab: int) -> np.ndarray:
    out = np.zeros((vocab, rows.shape[1]))
    np.add.at(out, ids, rows)
    return out


def _segments(large: bool, dtype: Any, method: str, vocab: int) -> Any:
    n, width = (8192, 192) if large else (512, 8)
    rng = np.random.default_rng(1)
    ids, rows = _zipf(rng, vocab, n), _normal(rng, dtype, n, width)
    return (
        lambda i, g: (embedding.segment_sum(method, i, g, vocab),),
        (mx.array(ids), rows),
        (_sum_by_id(ids, wide(rows), vocab),),
    )


def _norm(large: bool, dtype: Any, centre: bool) -> Any:
    rows, width = (2048, 1024) if large else (48, 192)
    rng = np.random.default_rng(2)
    x, w, b = (
        _normal(rng, dtype, rows, width, scale=3, mean=2),
        _normal(rng, dtype, width, scale=0.1, mean=1),
        _normal(rng, dtype, width),
    )
    g = _normal(rng, mx.float32, rows, width)
    ours: Any = norms.layer_norm if centre else norms.rms_norm
    args = (x, w, b) if centre else (x, w)
    n = len(args)
    reference = _norm_reference(wide(x), wide(w), wide(b) if centre else np.zeros(width), wide(g), centre)
    return _with_gradients(lambda *a: ours(*a, EPS), g, n), args, reference[: n + 1]


def _norm_reference(x: np.ndarray, w: np.ndarray, b: np.ndarray, g: np.ndarray, centre: bool) -> Reference:
    c = x - x.mean(-1, keepdims=True) if centre else x
    r = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + EPS)
    n, gn = c * r, g * w
    dx = r * (gn - n * (gn * n).mean(-1, keepdims=True) - (gn.mean(-1, keepdims=True) if centre else 0))
    return n * w + b, dx, (g * n).sum(0), g.sum(0)


def _attention(large: bool, dtype: Any, packed: bool) -> Any:
    batch, heads, t, d = (2, 4, 512, 64) if large else (2, 2, 32, 16)
    rng = np.random.default_rng(3)
    q, k, v, g = (_normal(rng, kind, batch, heads, t, d) for kind in (dtype, dtype, dtype, mx.float32))
    allowed = np.tril(np.ones((batch, 1, t, t), bool))
    if packed:  # two documents to a row, cut elsewhere in each
        document = np.arange(t)[None] >= (np.arange(batch)[:, None] + 1) * t // (batch + 1)
        allowed &= (document[:, :, None] == document[:, None, :])[:, None]
    mask = mx.array(allowed) if packed else None
    scale = d**-0.5
    reference = _attention_reference(wide(q), wide(k), wide(v), wide(g), scale, allowed)
    return _with_gradients(lambda q, k, v: attention(q, k, v, scale, mask), g, 3), (q, k, v), reference


def _attention_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, scale: float, allowed: np.ndarray
) -> Reference:
    scores = np.where(allowed, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


def _lookup(large: bool, dtype: Any) -> Any:
    vocab, n, width = (32_000, 8192, 192) if large else (300, 512, 8)
    rng = np.random.default_rng(4)
    table, g, ids = _normal(rng, dtype, vocab, width), _normal(rng, mx.float32, n, width), _zipf(rng, vocab, n)
    given = mx.array(ids)
    return (
        _with_gradients(lambda w: lookup(w, given), g, 1),
        (table,),
        (wide(table)[ids], _sum_by_id(ids, wide(g), vocab)),
    )


class _Linear(mlx.nn.Module):
    """The multiplication of mlx-lm's SwitchLinear, which need not be installed."""

    def __init__(self, weight: Any):
        super().__init__()
        self.weight = weight

    def __call__(self, x: Any, indices: Any, sorted_indices: bool = False) -> Any:
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)


class _Routed(switch.SwitchLinear, _Linear):
    pass


def _tokens(large: bool, dtype: Any) -> tuple[Any, Any, Any, np.ndarray]:
    """Tokens x (n, width), weights (experts, out, width), a cotangent (n, chosen, out), experts (n, chosen)."""
    n, width, out, experts, chosen = (2048, 128, 96, 8, 3) if large else (40, 16, 12, 5, 3)
    rng = np.random.default_rng(5)
    x, w = _normal(rng, dtype, n, width), _normal(rng, dtype, experts, out, width, scale=width**-0.5)
    picks = np.stack([rng.permutation(experts)[:chosen] for _ in range(n)]).astype(np.int32)
    return x, w, _normal(rng, mx.float32, n, chosen, out), picks


def _mixture_reference(x: np.ndarray, w: np.ndarray, g: np.ndarray, picks: np.ndarray) -> Reference:
    value, dx, dw = np.zeros(g.shape), np.zeros_like(x), np.zeros_like(w)
    for expert in range(len(w)):
        token, place = np.nonzero(picks == expert)  # each token once at most
        value[token, place] = x[token] @ w[expert].T
        dx[token] += g[token, place] @ w[expert]
        dw[expert] = g[token, place].T @ x[token]
    return value, dx, dw


def _routed(large: bool, dtype: Any) -> Any:
    x, w, g, picks = _tokens(large, dtype)
    chosen = mx.array(picks)

    def run(x: Any, w: Any) -> Any:
        return _Routed(w)(x[:, None, None, :], chosen)[:, :, 0]

    return _with_gradients(run, g, 2), (x, w), _mixture_reference(wide(x), wide(w), wide(g), picks)


def _sorted_tokens(large: bool, dtype: Any) -> Any:
    """As SwitchGLU and SwitchMLP run: gather_sort, sorted products, and back."""
    x, w, g, picks = _tokens(large, dtype)
    chosen = mx.array(picks)

    def run(x: Any, w: Any) -> Any:
        rows, experts, back = switch.gather_sort(x[:, None, None, :], chosen)
        y = mx.gather_mm(rows, w.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=True)
        return y[back].reshape(g.shape)

    return _with_gradients(run, g, 2), (x, w), _mixture_reference(wide(x), wide(w), wide(g), picks)
