"""Operations in place of fused kernels: equal to MLX's own path on the CPU and to float64, gradients included."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxdet.nn as det
from mlxdet.nn import fast
from mlxdet.nn.conv import conv


def normal(rng, *shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def wide(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def close(a, b, tolerance):
    a, b = wide(a), wide(b)
    return a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


DTYPES = [mx.float32, mx.bfloat16]


@pytest.mark.parametrize("x_dtype, w_dtype", list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, False)])
def test_layer_norm(backend, x_dtype, w_dtype, given):
    rng = np.random.default_rng(0)
    x = (normal(rng, 3, 5, 64) * 2 + 1).astype(x_dtype)
    w, b = (normal(rng, 64).astype(w_dtype) if g else None for g in given)
    got, want = fast.layer_norm(x, w, b, 1e-5), mx.fast.layer_norm(x, w, b, 1e-5)
    assert got.dtype == want.dtype
    wx = wide(x)
    ref = (wx - wx.mean(-1, keepdims=True)) / np.sqrt(wx.var(-1, keepdims=True) + 1e-5)
    ref = ref * (1 if w is None else wide(w)) + (0 if b is None else wide(b))
    half = got.dtype != mx.float32
    assert np.linalg.norm(wide(got) - ref) <= (3e-3 if half else 1e-6) * np.linalg.norm(ref)
    assert close(got, want, 6e-3 if half else 1e-6)


@pytest.mark.parametrize("x_dtype, w_dtype", list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(backend, x_dtype, w_dtype, weighted):
    rng = np.random.default_rng(1)
    x, w = normal(rng, 3, 5, 64).astype(x_dtype), normal(rng, 64).astype(w_dtype) if weighted else None
    got, want = fast.rms_norm(x, w, 1e-5), mx.fast.rms_norm(x, w, 1e-5)
    assert got.dtype == want.dtype
    wx = wide(x)
    ref = wx / np.sqrt((wx**2).mean(-1, keepdims=True) + 1e-5) * (1 if w is None else wide(w))
    half = got.dtype != mx.float32
    assert np.linalg.norm(wide(got) - ref) <= (3e-3 if half else 1e-6) * np.linalg.norm(ref)
    assert close(got, want, 6e-3 if half else 1e-6)


@pytest.mark.parametrize(
    "plain, mine",
    [
        (nn.LayerNorm(32), det.LayerNorm(32)),
        (nn.LayerNorm(32, bias=False), det.LayerNorm(32, bias=False)),
        (nn.LayerNorm(32, affine=False), det.LayerNorm(32, affine=False)),
        (nn.RMSNorm(32), det.RMSNorm(32)),
    ],
)
def test_the_norm_layers_and_their_gradients(backend, plain, mine):
    rng = np.random.default_rng(2)
    x, out = normal(rng, 4, 32), normal(rng, 4, 32)
    assert repr(plain) == repr(mine)
    for a in (plain, mine):
        a.update({k: normal(np.random.default_rng(5), 32) for k in a.parameters()})

    def both(module):
        return mx.value_and_grad(lambda p, x: (module.update(p)(x) * out).sum(), argnums=(0, 1))(module.parameters(), x)

    (y, (p, dx)), (want, (wp, wdx)) = both(mine), both(plain)
    assert close(y, want, 1e-5) and close(dx, wdx, 1e-6)
    assert p.keys() == wp.keys() and all(close(p[k], wp[k], 1e-6) for k in wp)


def delta_in_float64(q, k, v, gamma, beta, state, mask):
    """Position by position and head by head, from the recurrence S <- S (g) + beta (v - S g k) k^T; y = S q."""
    (b, t, hk, _), (hv, dv) = q.shape, v.shape[-2:]
    y, state = np.zeros((b, t, hv, dv)), state.copy()
    for n, h, i in itertools.product(range(b), range(hv), range(t)):
        if mask[n, i]:
            s = state[n, h] * gamma[n, i, h]
            key = k[n, i, h // (hv // hk)]
            s = s + np.outer(beta[n, i, h] * (v[n, i, h] - s @ key), key)
            state[n, h], y[n, i, h] = s, s @ q[n, i, h // (hv // hk)]
    return y, state


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta_update(backend, vector, start, masked):
    rng = np.random.default_rng(3)
    b, t, hk, hv, dk, dv = 2, 5, 2, 4, 32, 8
    q, k, v = normal(rng, b, t, hk, dk) * 0.2, normal(rng, b, t, hk, dk) * 0.2, normal(rng, b, t, hv, dv)
    gamma = mx.sigmoid(normal(rng, b, t, hv, dk) if vector else normal(rng, b, t, hv))
    beta, state = mx.sigmoid(normal(rng, b, t, hv)), normal(rng, b, hv, dv, dk) if start else None
    mask = mx.array(rng.random((b, t)) > 0.3) if masked else None
    y, last = fast.gated_delta_update(q, k, v, gamma, beta, state, mask)
    want, want_last = mx.fast.gated_delta_update(q, k, v, gamma, beta, state, mask)
    assert close(y, want, 1e-6) and close(last, want_last, 1e-6)
    zeros = np.zeros((b, hv, dv, dk))
    ref = delta_in_float64(
        *map(wide, (q, k, v)),
        wide(gamma) if vector else wide(gamma)[..., None],
        wide(beta),
        zeros if state is None else wide(state),
        np.ones((b, t), bool) if mask is None else np.array(mask),
    )
    assert np.abs(wide(y) - ref[0]).max() < 1e-5 and np.abs(wide(last) - ref[1]).max() < 1e-5
    half = fast.gated_delta_update(*(a.astype(mx.bfloat16) for a in (q, k, v, gamma, beta)))
    assert (half[0].dtype, half[1].dtype) == (mx.bfloat16, mx.float32)


def conv_in_float64(x, w, stride, padding, dilation, groups):
    """One output at a time, one dimension."""
    x = np.pad(x, ((0, 0), (padding, padding), (0, 0)))
    k, per = w.shape[1], w.shape[0] // groups
    out = np.zeros((x.shape[0], (x.shape[1] - dilation * (k - 1) - 1) // stride + 1, w.shape[0]))
    for n, i, o in itertools.product(*map(range, out.shape)):
        c = slice(o // per * w.shape[2], (o // per + 1) * w.shape[2])
        out[n, i, o] = sum(x[n, i * stride + j * dilation, c] @ w[o, j] for j in range(k))
    return out


@pytest.mark.parametrize("stride, padding, dilation, groups", [(1, 0, 1, 1), (2, 3, 1, 2), (1, 2, 2, 6), (3, 0, 2, 1)])
def test_conv1d(backend, stride, padding, dilation, groups):
    rng = np.random.default_rng(4)
    x, w = normal(rng, 2, 13, 6), normal(rng, 12, 4, 6 // groups)
    got = conv(x, w, stride, padding, dilation, groups)
    ref = conv_in_float64(wide(x), wide(w), stride, padding, dilation, groups)
    assert got.shape == ref.shape and np.abs(wide(got) - ref).max() < 1e-5
    assert close(got, mx.conv1d(x, w, stride, padding, dilation, groups), 1e-6)


@pytest.mark.parametrize(
    "plain, mine, shape",
    [
        (nn.Conv1d, det.Conv1d, (2, 9, 4)),
        (nn.Conv2d, det.Conv2d, (2, 7, 9, 4)),
        (nn.Conv3d, det.Conv3d, (1, 5, 6, 7, 4)),
    ],
)
def test_the_convolution_layers_and_their_gradients(backend, plain, mine, shape):
    rng = np.random.default_rng(6)
    x = normal(rng, *shape)
    mlx, own = plain(4, 8, 3, stride=2, padding=1), mine(4, 8, 3, stride=2, padding=1)
    own.update(mlx.parameters())
    out = normal(rng, *mlx(x).shape)

    def both(module):
        return mx.value_and_grad(lambda p, x: (module.update(p)(x) * out).sum(), argnums=(0, 1))(module.parameters(), x)

    (y, (p, dx)), (want, (wp, wdx)) = both(own), both(mlx)
    assert close(own(x), mlx(x), 1e-6) and close(y, want, 1e-5) and close(dx, wdx, 1e-6)
    assert p.keys() == wp.keys() and all(close(p[k], wp[k], 1e-6) for k in wp)


def test_a_kernel_larger_than_its_input_is_refused(backend):
    with pytest.raises(ValueError, match="smaller than the kernel"):
        conv(mx.zeros((1, 3, 2)), mx.zeros((2, 4, 2)))
