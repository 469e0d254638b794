"""Norms and attention from plain operations, against float64 and MLX's own, values and gradients. Run on the CPU."""

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.backends.cuda.attention import attention
from mlxdet.backends.cuda.norms import layer_norm, rms_norm

RNG = np.random.default_rng(0)
X, W, B = RNG.standard_normal((3, 5, 256)) * 3 + 1, RNG.standard_normal(256), RNG.standard_normal(256)
Q, K, V = (RNG.standard_normal((2, 3, 9, 16)) for _ in range(3))


def layer_norm64(x):
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-5) * W + B


def rms_norm64(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * W


def attention64(q, k, v):
    s = q @ k.swapaxes(-1, -2) * 0.25
    lower = np.arange(k.shape[-2] - q.shape[-2], k.shape[-2])[:, None] >= np.arange(k.shape[-2])
    s = np.where(lower, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def f32(a):
    return mx.array(a.astype(np.float32))


CASES = {
    "layer_norm": (lambda x: layer_norm(x, f32(W), f32(B), 1e-5), lambda x: mx.fast.layer_norm(x, f32(W), f32(B), 1e-5), layer_norm64, X),
    "rms_norm": (lambda x: rms_norm(x, f32(W), 1e-5), lambda x: mx.fast.rms_norm(x, f32(W), 1e-5), rms_norm64, X),
    "attention": (
        lambda x: attention(x, f32(K), f32(V), 0.25),
        lambda x: mx.fast.scaled_dot_product_attention(x, f32(K), f32(V), scale=0.25, mask="causal"),
        lambda x: attention64(x, K, V),
        Q,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(backend, name):
    ours, fused, exact, x = CASES[name]
    want = exact(x)
    got = ours(f32(x))
    assert got.dtype == mx.float32
    assert np.abs(np.array(got) - want).max() <= 3e-6 * np.abs(want).max()
    weight = f32(RNG.standard_normal(want.shape))
    a = mx.grad(lambda x: (ours(x) * weight).sum())(f32(x))
    b = mx.grad(lambda x: (fused(x) * weight).sum())(f32(x))
    assert mx.abs(a - b).max().item() <= 1e-5 * mx.abs(b).max().item()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_comes_back_as_bfloat16(backend, name):
    ours, _, exact, x = CASES[name]
    low = f32(x).astype(mx.bfloat16)
    if name == "attention":
        got = attention(low, f32(K).astype(mx.bfloat16), f32(V).astype(mx.bfloat16), 0.25)
    else:
        got = ours(low)
    assert got.dtype == mx.bfloat16
    assert np.abs(np.array(got.astype(mx.float32)) - exact(x)).max() < 0.03 * np.abs(exact(x)).max()


def test_attention_aligns_the_last_query_with_the_last_key_and_sees_no_future(backend):
    got = np.array(attention(f32(Q[:, :, -2:]), f32(K), f32(V), 0.25))
    np.testing.assert_allclose(got, attention64(Q, K, V)[:, :, -2:], atol=2e-6)
    changed = V.copy()
    changed[:, :, -1] += 100
    again = np.array(attention(f32(Q), f32(K), f32(changed), 0.25))
    assert np.array_equal(again[:, :, :-1], np.array(attention(f32(Q), f32(K), f32(V), 0.25))[:, :, :-1])
