"""GELU, softmax attention and cross entropy against float64, beside MLX's own, at the extremes and in bfloat16."""

import io
import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxdet.model import fastmath

ERFC = np.vectorize(math.erfc, otypes=[np.float64])


def gelu64(x):
    """Value and slope."""
    x = x.astype(np.float64)
    cdf = 0.5 * ERFC(-x / math.sqrt(2.0))
    return x * cdf, cdf + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def softmax64(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention64(q, k, v, g, scale):
    """Value and the gradients by q, k and v for the cotangent g."""
    q, k, v, g = (a.astype(np.float64) for a in (q, k, v, g))
    queries, keys = q.shape[-2], k.shape[-2]
    allowed = np.arange(keys - queries, keys)[:, None] >= np.arange(keys)[None, :]
    p = softmax64(np.where(allowed, scale * q @ k.swapaxes(-1, -2), -np.inf))
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


def cross_entropy64(logits, targets, g):
    """Value and the gradient by logits for the cotangent g."""
    logits = logits.astype(np.float64)
    p = softmax64(logits)
    hot = np.eye(logits.shape[-1])[targets]
    return -np.log(np.take_along_axis(p, targets[..., None], -1))[..., 0], (p - hot) * g[..., None].astype(np.float64)


def plain_attention(q, k, v, scale):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")


def plain_cross_entropy(logits, targets):
    return nn.losses.cross_entropy(logits, targets, reduction="none")


def run(f, inputs, cotangent):
    """Value and gradients of f, compiled as in a training step, as float32 numpy."""

    @mx.compile
    def both(cotangent, *inputs):
        values, gradients = mx.vjp(f, list(inputs), [cotangent])
        return values + gradients

    return [np.array(a.astype(mx.float32)) for a in both(mx.array(cotangent), *map(mx.array, inputs))]


def error(got, want, size=None):
    """Largest error, each element's relative to `size` (default: the largest wanted value)."""
    return float((np.abs(got.astype(np.float64) - want) / (np.abs(want).max() if size is None else size)).max())


def no_worse(name, ours, mlx, want, bound, size=None):
    """Ours within `bound` everywhere, and in the mean square no worse than 1.5 times MLX's, or a quarter of a bit."""
    size = max(np.abs(want).max(), 1e-30) if size is None else size
    (worst, mean), (worst_mlx, mean_mlx) = (
        (
            error(a, want, size),
            float(np.sqrt(np.mean(((a.astype(np.float64) - want) / size) ** 2))),
        )
        for a in (ours, mlx)
    )
    print(f"{name}: largest error {worst:.1e}, MLX's {worst_mlx:.1e}; mean square {mean:.1e}, MLX's {mean_mlx:.1e}")
    few = np.size(want) < 500  # too few for a mean to mean much
    assert worst <= bound and (few or mean <= max(1.5 * mean_mlx, 1.5e-8)), (name, worst, mean, mean_mlx)


def test_gelu_and_its_slope_are_as_accurate_as_mlx(backend):
    x = np.concatenate(
        [
            np.linspace(-9.0, 9.0, 60_001),
            np.logspace(-40, 1, 2_001),
            -np.logspace(-40, 1, 2_001),
        ]
    )
    x = x.astype(np.float32)
    value, slope = gelu64(x)
    ones, size = np.ones_like(x), np.maximum(np.abs(x), 1.0)
    ours, mlx = run(fastmath.gelu, [x], ones), run(nn.gelu, [x], ones)
    no_worse("gelu", ours[0], mlx[0], value, 1.5e-7, size)
    no_worse("slope of gelu", ours[1], mlx[1], slope, 2e-7, 1.0)


def test_gelu_keeps_its_relative_accuracy_near_zero(backend):
    x = np.array([1e-3, -1e-3, 1e-10, -1e-10, 1e-30, -1e-30, 2e-38, -2e-38], np.float32)
    value, slope = run(fastmath.gelu, [x], np.ones_like(x))
    assert error(value, gelu64(x)[0], np.abs(x)) < 2e-7
    assert error(slope, gelu64(x)[1], 1.0) < 2e-7


def test_gelu_at_the_extremes(backend):
    x = np.array(
        [
            0.0,
            -0.0,
            1e-40,
            -1e-40,
            5.5,
            -5.5,
            87.0,
            -87.0,
            1e4,
            -1e4,
            1e19,
            -1e19,
            3e38,
            -3e38,
        ],
        np.float32,
    )
    value, slope = run(fastmath.gelu, [x], np.ones_like(x))
    np.testing.assert_allclose(value, gelu64(x)[0], rtol=2.5e-7, atol=6e-7)
    np.testing.assert_allclose(slope, gelu64(x)[1], rtol=0, atol=3.5e-7)
    big = np.abs(x) >= 87.0
    np.testing.assert_array_equal(value[big], np.maximum(x[big], 0.0))
    np.testing.assert_array_equal(slope[big], (x[big] > 0).astype(np.float32))
    value, slope = run(fastmath.gelu, [np.array([np.nan], np.float32)], np.ones(1, np.float32))
    assert np.isnan(value).all() and np.isnan(slope).all()
    assert not np.isfinite(
        run(
            fastmath.gelu,
            [np.array([np.inf, -np.inf], np.float32)],
            np.ones(2, np.float32),
        )[0]
    ).any()


def test_exp2_is_accurate_and_ends_in_an_exact_zero(backend):
    halves = -np.arange(0.5, 125.0)  # where 2**x changes from one power of two to the next
    near = [np.nextafter(halves.astype(np.float32), np.float32(side)) for side in (0, -200)]
    x = np.concatenate([np.linspace(-125.5, 0.0, 100_001), -np.arange(126.0), halves, *near]).astype(np.float32)
    got, want = (
        np.array(mx.compile(fastmath.exp2_nonpositive)(mx.array(x))),
        np.exp2(x.astype(np.float64)),
    )
    assert error(got, want, want) < 1.5e-7
    whole = x == np.round(x)
    np.testing.assert_array_equal(got[whole], want[whole])
    far = mx.array(np.array([-128.0, -1e4, -1e10, -1.5e38, np.nan], np.float32))
    np.testing.assert_array_equal(np.array(fastmath.exp2_nonpositive(far)), [0.0, 0.0, 0.0, 0.0, np.nan])


SHAPES = [
    (2, 3, 40, 40, 16),
    (1, 2, 5, 37, 8),
    (2, 1, 1, 9, 4),
    (1, 1, 1, 1, 4),
    (1, 2, 130, 130, 32),
]


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients_are_as_accurate_as_mlx(backend, shape, size):
    b, h, queries, keys, d = shape
    rng = np.random.default_rng(0)
    q, k, v, g = (
        rng.standard_normal((b, h, t, d)).astype(np.float32) * s
        for t, s in ((queries, size), (keys, size), (keys, 1.0), (queries, 1.0))
    )
    scale = d**-0.5
    want = attention64(q, k, v, g, scale)
    ours = run(lambda *a: fastmath.attention(*a, scale), [q, k, v], g)
    mlx = run(lambda *a: plain_attention(*a, scale), [q, k, v], g)
    bound = 1.5e-6 * max(1.0, size * size)  # a score of size s carries s * 2**-24 of rounding into its weight
    for name, a, m, w in zip(("attention", "by q", "by k", "by v"), ours, mlx, want, strict=True):
        no_worse(f"{name} {shape}", a, m, w, bound)


def test_a_changed_future_token_changes_no_bit(backend):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 2, 24, 8)).astype(np.float32) for _ in range(3))
    g = np.ones_like(q)
    f = lambda *a: fastmath.attention(*a, 0.35)  # noqa: E731
    before = run(f, [q, k, v], g)[0]
    for value in (50.0, 1e4, 1e15):
        k2, v2 = k.copy(), v.copy()
        k2[:, :, 15:], v2[:, :, 15:] = value, -value
        after = run(f, [q, k2, v2], g)[0]
        np.testing.assert_array_equal(after[:, :, :15], before[:, :, :15])
        assert not np.array_equal(after[:, :, 15:], before[:, :, 15:])  # the negative control
    # The other way: the gradient of an early output reaches no later key or value.
    g[:, :, 10:] = 0.0
    _, _, dk, dv = run(f, [q, k, v], g)
    assert not dk[:, :, 10:].any() and not dv[:, :, 10:].any() and dv[:, :, 9].any()


def test_attention_at_the_extremes(backend):
    d = 8
    for size in (0.0, 1e-30, 30.0, 1e4, 1e15):
        q = np.full((1, 1, 6, d), size, np.float32)
        k = q * np.array([1.0, -1.0, 0.5, 1.0, -1.0, 1.0], np.float32)[:, None]
        v = np.arange(6 * d, dtype=np.float32).reshape(1, 1, 6, d)
        got = run(lambda *a: fastmath.attention(*a, 1.0), [q, k, v], np.ones_like(v))
        want = attention64(q, k, v, np.ones_like(v), 1.0)
        assert all(np.isfinite(a).all() for a in got)
        assert error(got[0], want[0]) < 1e-6
    v[0, 0, 2, 3] = np.nan
    assert np.isnan(run(lambda *a: fastmath.attention(*a, 1.0), [q, k, v], np.ones_like(v))[0][0, 0, 2:, 3]).all()
    q[0, 0, 4] = np.nan
    assert np.isnan(run(lambda *a: fastmath.attention(*a, 1.0), [q, k, v], np.ones_like(v))[0][0, 0, 4]).all()


@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("shape", [(3, 50, 256), (7, 1000), (2, 1)])
def test_cross_entropy_and_its_gradient_are_as_accurate_as_mlx(backend, shape, size):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(shape).astype(np.float32) * np.float32(size)
    targets, g = (
        rng.integers(0, shape[-1], shape[:-1]).astype(np.int32),
        rng.uniform(size=shape[:-1]).astype(np.float32),
    )
    value, gradient = cross_entropy64(logits, targets, g)
    ours, mlx = (
        run(lambda x, f=f: f(x, mx.array(targets)), [logits], g) for f in (fastmath.cross_entropy, plain_cross_entropy)
    )
    scale = np.maximum(np.abs(value), 1.0)
    no_worse("cross entropy", ours[0], mlx[0], value, 5e-7, scale)
    no_worse("by logits", ours[1], mlx[1], gradient, 1e-6, 1.0)


def test_cross_entropy_at_the_extremes(backend):
    logits = np.array(
        [
            [0.0, -0.0, 1e-40],
            [87.0, -87.0, 0.0],
            [1e4, -1e4, 0.0],
            [-1e4, 1e4, 0.0],
            [3e37, 0.0, -3e37],
        ],
        np.float32,
    )
    targets = np.array([1, 1, 0, 0, 2], np.int32)
    ones = np.ones(5, np.float32)
    got = run(lambda x: fastmath.cross_entropy(x, mx.array(targets)), [logits], ones)
    np.testing.assert_allclose(got[0], [math.log(3), 174.0, 0.0, 2e4, 6e37], rtol=2e-7)
    np.testing.assert_allclose(got[1][2], [0.0, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(got[1][3], [-1.0, 1.0, 0.0], atol=1e-7)
    for bad in (np.nan, np.inf):
        row = np.array([[0.0, bad, 1.0]], np.float32)
        value, gradient = run(lambda x: fastmath.cross_entropy(x, mx.array([0])), [row], ones[:1])
        assert not np.isfinite(value).any() and not np.isfinite(gradient).all()


def test_bfloat16_goes_in_and_comes_out_and_float32_is_in_between(backend):
    rng = np.random.default_rng(3)
    x = mx.array(rng.standard_normal((64, 64)).astype(np.float32)).astype(mx.bfloat16)
    exact = np.array(x.astype(mx.float32))
    for compiled in (fastmath.gelu, mx.compile(fastmath.gelu)):
        y = compiled(x)
        gradient = mx.grad(lambda x, f=compiled: f(x).astype(mx.float32).sum())(x)
        assert y.dtype == gradient.dtype == mx.bfloat16
        # Correctly rounded but for a few near ties: the error is bfloat16's half a unit in the last place.
        assert (
            error(
                np.array(y.astype(mx.float32)),
                gelu64(exact)[0],
                np.maximum(np.abs(exact), 1e-3),
            )
            < 2.0**-8
        )
        assert error(np.array(gradient.astype(mx.float32)), gelu64(exact)[1], 1.0) < 2.0**-8
    q, k, v, g = (
        mx.array(rng.standard_normal((2, 2, 33, 16)).astype(np.float32)).astype(mx.bfloat16) for _ in range(4)
    )
    want = attention64(*(np.array(a.astype(mx.float32)) for a in (q, k, v, g)), 0.25)
    values, gradients = mx.vjp(lambda *a: fastmath.attention(*a, 0.25), [q, k, v], [g])
    for got, w in zip(values + gradients, want, strict=True):
        assert got.dtype == mx.bfloat16
        assert error(np.array(got.astype(mx.float32)), w) < 2e-2


def test_gradients_are_those_of_the_plain_formulas(backend):
    """Each slope is written by hand: MLX's own derivative of the plain formula has to agree."""
    rng = np.random.default_rng(4)
    x, g = (rng.standard_normal((50, 40)).astype(np.float32) * 2 for _ in range(2))
    np.testing.assert_allclose(run(fastmath.gelu, [x], g)[1], run(nn.gelu, [x], g)[1], rtol=1e-6, atol=3e-6)
    q, k, v, g = (rng.standard_normal((2, 2, 20, 8)).astype(np.float32) for _ in range(4))
    ours = run(lambda *a: fastmath.attention(*a, 0.3), [q, k, v], g)
    for a, b in zip(ours, run(lambda *p: plain_attention(*p, 0.3), [q, k, v], g), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=4e-6)
    logits, targets = (
        rng.standard_normal((30, 17)).astype(np.float32),
        mx.array(rng.integers(0, 17, 30)),
    )
    g = rng.standard_normal(30).astype(np.float32)
    ours = run(lambda x: fastmath.cross_entropy(x, targets), [logits], g)
    for a, b in zip(ours, run(lambda x: plain_cross_entropy(x, targets), [logits], g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_the_same_bits_again_and_the_same_values_uncompiled(backend):
    rng = np.random.default_rng(5)
    x, g = (mx.array(rng.standard_normal((64, 33)).astype(np.float32) * 3) for _ in range(2))

    def both(x, g):
        values, gradients = mx.vjp(fastmath.gelu, [x], [g])
        return values[0], gradients[0], fastmath.cross_entropy(x, mx.arange(64) % 33)

    compiled = mx.compile(both)
    once = [np.array(a) for a in compiled(x, g)]
    for a, b, c in zip(once, compiled(x, g), both(x, g), strict=True):
        np.testing.assert_array_equal(a, np.array(b))
        np.testing.assert_allclose(a, np.array(c), rtol=0, atol=4e-6)  # a host that fuses multiply and add may differ


def test_the_loops_are_few_and_fast(backend):
    """Kernels of GELU with its gradient: polynomial, tail, slope, value, product; a shared expression adds more."""
    text = io.StringIO()
    mx.export_to_dot(
        text,
        *mx.compile(lambda x, g: mx.vjp(fastmath.gelu, [x], [g]))(mx.ones((8, 8)), mx.ones((8, 8))),
    )
    assert len(re.findall(r'label ?= ?"Compiled', text.getvalue())) == 4, text.getvalue()
