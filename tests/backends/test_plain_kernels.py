"""CUDA's norms and attention from plain operations: right by float64, as good as MLX's own, true to the dtype."""

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.backends.cuda.attention import attention
from mlxdet.backends.cuda.norms import layer_norm, rms_norm

EPS = 1e-5
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# Largest error allowed relative to the largest value, by dtype: a few units of rounding.
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 2e-2, mx.float16: 3e-3}


def normal(seed: int, *shape: int, dtype=mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def error(ours: mx.array, reference: np.ndarray) -> float:
    return float(np.abs(wide(ours) - reference).max() / np.abs(reference).max())


def norm_reference(x, w, b, g, centre: bool):
    """Value of a norm and the gradients of sum(norm * g) by x, w, b, by the textbook, in float64."""
    c = x - x.mean(-1, keepdims=True) if centre else x
    r = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + EPS)
    n = c * r
    gn = g * w
    dx = r * (gn - n * (gn * n).mean(-1, keepdims=True) - (gn.mean(-1, keepdims=True) if centre else 0))
    rows = tuple(range(x.ndim - 1))
    return n * w + b, dx, (g * n).sum(rows), g.sum(rows)


NORMS = {
    "layer": (layer_norm, lambda *args: mx.fast.layer_norm(*args), True),
    "rms": (lambda x, w, b, eps: rms_norm(x, w, eps) + 0 * b, lambda x, w, b, eps: mx.fast.rms_norm(x, w, eps), False),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 64), (3, 768), (1, 1, 1, 7)], ids=str)
def test_norms_have_the_values_and_gradients_of_the_textbook(kind, dtype, shape):
    ours, fused, centre = NORMS[kind]
    x = (3 * normal(1, *shape) + 2).astype(dtype)
    w, b, g = (1 + 0.1 * normal(2, shape[-1])).astype(dtype), normal(3, shape[-1]).astype(dtype), normal(4, *shape)
    if kind == "rms":
        b = mx.zeros_like(b)
    reference = norm_reference(*(wide(a) for a in (x, w, b, g)), centre)

    def loss(f, *arguments):
        return (f(*arguments, EPS).astype(mx.float32) * g).sum()

    gradients = mx.compile(mx.grad(lambda *a: loss(ours, *a), argnums=(0, 1, 2)))(x, w, b)
    theirs = mx.grad(lambda *a: loss(fused, *a), argnums=(0, 1))(x, w, b)
    value = ours(x, w, b, EPS)
    assert value.dtype == dtype
    assert [a.dtype for a in gradients] == [dtype] * 3
    assert error(value, reference[0]) < TOLERANCE[dtype]
    for i in range(2 if kind == "rms" else 3):
        found = error(gradients[i], reference[i + 1])
        assert found < TOLERANCE[dtype]
        if i < 2:  # no worse than MLX's own, up to a rounding of the result
            assert found < 2 * error(theirs[i], reference[i + 1]) + TOLERANCE[dtype] / 2


@pytest.mark.parametrize("kind", NORMS)
def test_float32_weights_do_not_promote_bfloat16_activations(kind):
    x, w = normal(1, 4, 64, dtype=mx.bfloat16), mx.ones(64)
    ours = layer_norm(x, w, mx.zeros(64), EPS) if kind == "layer" else rms_norm(x, w, EPS)
    assert ours.dtype == mx.bfloat16


def test_a_large_mean_does_not_cancel():
    x = 1000 + normal(1, 8, 256)
    reference = norm_reference(wide(x), np.ones(256), np.zeros(256), np.zeros((8, 256)), True)[0]
    assert error(layer_norm(x, mx.ones(256), mx.zeros(256), EPS), reference) < 2e-4


def test_a_row_of_zeros_is_not_nan():
    gradient = mx.grad(lambda x: layer_norm(x, mx.ones(8), mx.zeros(8), EPS).sum())(mx.zeros((2, 8)))
    assert np.isfinite(np.array(gradient)).all()


def attention_reference(q, k, v, g, scale):
    """Value of causal attention and the gradients of sum(out * g) by q, k, v, by the textbook, in float64."""
    t, s = q.shape[-2], k.shape[-2]
    scores = np.where(np.arange(s - t, s)[:, None] >= np.arange(s)[None, :], q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (1, 9), (5, 12), (1, 1)])
def test_attention_has_the_values_and_gradients_of_the_textbook(dtype, queries, keys):
    scale = 32**-0.5
    q, g = normal(1, 2, 3, queries, 32, dtype=dtype), normal(4, 2, 3, queries, 32)
    k, v = normal(2, 2, 3, keys, 32, dtype=dtype), normal(3, 2, 3, keys, 32, dtype=dtype)
    reference = attention_reference(*(wide(a) for a in (q, k, v, g)), scale)

    def loss(f, *arguments):
        return (f(*arguments).astype(mx.float32) * g).sum()

    def fused(*arguments):
        return mx.fast.scaled_dot_product_attention(*arguments, scale=scale, mask="causal")

    gradients = mx.compile(mx.grad(lambda *a: loss(lambda q, k, v: attention(q, k, v, scale), *a), argnums=(0, 1, 2)))
    ours, theirs = gradients(q, k, v), mx.grad(lambda *a: loss(fused, *a), argnums=(0, 1, 2))(q, k, v)
    value = attention(q, k, v, scale)
    assert value.dtype == dtype
    assert [a.dtype for a in ours] == [dtype] * 3
    assert error(value, reference[0]) < TOLERANCE[dtype]
    assert error(fused(q, k, v), reference[0]) < TOLERANCE[dtype]
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        if keys == 1 and i < 3:  # one key: the softmax is constant
            assert np.abs(wide(one)).max() < 1e-6
            continue
        assert error(one, reference[i]) < max(TOLERANCE[dtype], 2 * error(other, reference[i]))


def test_attention_does_not_see_the_future():
    q, k, v = (normal(i, 1, 1, 8, 16) for i in (1, 2, 3))
    changed = mx.concatenate([v[..., :5, :], v[..., 5:, :] + 1], axis=-2)
    one, two = attention(q, k, v, 0.25), attention(q, k, changed, 0.25)
    assert mx.array_equal(one[..., :5, :], two[..., :5, :])
    assert not mx.array_equal(one[..., 5:, :], two[..., 5:, :])


def test_large_scores_do_not_overflow():
    q, k, v = 100 * normal(1, 1, 1, 8, 16), 100 * normal(2, 1, 1, 8, 16), normal(3, 1, 1, 8, 16)
    reference = attention_reference(*(wide(a) for a in (q, k, v, v)), 0.25)[0]
    assert error(attention(q, k, v, 0.25), reference) < 1e-3


def test_more_queries_than_keys_is_an_error():
    with pytest.raises(ValueError, match="5 queries have only 4 keys to look at"):
        attention(normal(1, 1, 1, 5, 8), normal(2, 1, 1, 4, 8), normal(3, 1, 1, 4, 8), 1.0)
