"""The CPU's own arithmetic against float64, no less accurate than MLX's, and its gradients against autodiff."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxdet.model import fastmath

RNG = np.random.default_rng(0)
WIDE = np.concatenate(
    [np.linspace(-12, 12, 20001), RNG.standard_normal(20000) * 3, [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e4, -1e4]]
)
WIDE = WIDE.astype(np.float32)
WIDE64 = WIDE.astype(np.float64)
ERF = np.vectorize(math.erf)


def test_exp_is_no_less_accurate_than_mlx():
    x = -np.abs(WIDE)
    x = x[x > -86]
    want = np.exp(x.astype(np.float64))
    ours = np.abs(np.array(fastmath.exp_nonpositive(mx.array(x))) - want) / want
    theirs = np.abs(np.array(mx.exp(mx.array(x))) - want) / want
    assert ours.max() < 2e-7 and ours.max() <= 2 * theirs.max()


def test_exp_at_its_ends():
    got = np.array(fastmath.exp_nonpositive(mx.array([0.0, -0.0, -87.0, -1000.0, -np.inf, np.nan])))
    assert got[0] == got[1] == 1.0 and np.isnan(got[5])
    assert np.all(got[2:5] < 2e-38) and np.all(got[2:5] >= 0)


def test_gelu_and_its_slope():
    cdf = 0.5 * (1 + ERF(WIDE64 / math.sqrt(2)))
    slope = cdf + WIDE64 * np.exp(-0.5 * WIDE64**2) / math.sqrt(2 * math.pi)
    value, grad = (np.array(a) for a in mx.vjp(fastmath.gelu, [mx.array(WIDE)], [mx.ones(WIDE.shape)]))
    value, grad = value[0], grad[0]
    ordinary = np.array(nn.gelu(mx.array(WIDE)))
    # Relative to the size of x: the approximation of the distribution function is off by 7.5e-8 at most.
    scale = np.maximum(1.0, np.abs(WIDE64))
    error = (np.abs(value - WIDE64 * cdf) / scale).max()
    assert error < 2e-7 and error <= 2 * (np.abs(ordinary - WIDE64 * cdf) / scale).max()
    assert np.abs(grad - slope).max() < 5e-7


@pytest.mark.parametrize("function", [fastmath.gelu, fastmath.exp_nonpositive])
def test_nan_goes_through(function):
    assert np.isnan(np.array(function(mx.array([np.nan, 1.0])))[0])


def test_gelu_keeps_bfloat16():
    got = fastmath.gelu(mx.array(WIDE).astype(mx.bfloat16))
    assert got.dtype == mx.bfloat16


def test_cross_entropy_and_its_gradient():
    logits = (RNG.standard_normal((7, 50)) * 20).astype(np.float32)
    targets = RNG.integers(0, 50, 7)
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    total = np.log(np.exp(wide - top).sum(-1, keepdims=True)) + top
    want = total[:, 0] - wide[np.arange(7), targets]
    p = np.exp(wide - total)
    p[np.arange(7), targets] -= 1

    def loss(x):
        return fastmath.cross_entropy(x, mx.array(targets)).sum()

    got = np.array(fastmath.cross_entropy(mx.array(logits), mx.array(targets)))
    assert np.abs(got - want).max() < 1e-5
    assert np.abs(np.array(mx.grad(loss)(mx.array(logits))) - p).max() < 5e-7


@pytest.mark.parametrize("queries", [9, 2, 1])
def test_attention_and_its_gradients(queries):
    q, k, v = (RNG.standard_normal((2, 3, n, 8)).astype(np.float32) * 2 for n in (queries, 9, 9))
    weight = mx.array(RNG.standard_normal((2, 3, queries, 8)).astype(np.float32))
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * 0.3
    scores = np.where(np.arange(9 - queries, 9)[:, None] >= np.arange(9), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v.astype(np.float64)
    arrays = [mx.array(a) for a in (q, k, v)]
    assert np.abs(np.array(fastmath.attention(*arrays, 0.3)) - want).max() < 2e-6

    def plain(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")

    ours = mx.grad(lambda *a: (fastmath.attention(*a, 0.3) * weight).sum(), argnums=(0, 1, 2))(*arrays)
    theirs = mx.grad(lambda *a: (plain(*a) * weight).sum(), argnums=(0, 1, 2))(*arrays)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.abs(a - b).max().item() <= 1e-5 * max(1.0, mx.abs(b).max().item())


def test_attention_sees_no_future():
    q, k, v = (mx.array(RNG.standard_normal((1, 2, 8, 4)).astype(np.float32)) for _ in range(3))
    changed = mx.array(np.concatenate([np.array(v)[:, :, :7], np.full((1, 2, 1, 4), 1e6, np.float32)], axis=2))
    a, b = np.array(fastmath.attention(q, k, v, 0.5)), np.array(fastmath.attention(q, k, changed, 0.5))
    assert np.array_equal(a[:, :, :7], b[:, :, :7]) and not np.array_equal(a[:, :, 7], b[:, :, 7])


def test_attention_in_bfloat16_comes_back_in_bfloat16():
    a = mx.array(RNG.standard_normal((1, 2, 8, 4)).astype(np.float32)).astype(mx.bfloat16)
    assert fastmath.attention(a, a, a, 0.5).dtype == mx.bfloat16
