"""exp, GELU, softmax attention and cross entropy from plain arithmetic, for MLX's CPU backend.

There the transcendental functions are scalar calls into the host's C library, 20 to 30 ns an element: in a small GPT
they take three quarters of a step. Written as multiplications and additions, MLX's compiler fuses them into one loop
that the host compiler vectorises, four to eight times faster, at an error no larger than the library's
(tests/model/test_fastmath.py holds both against float64), and the same on every host, whatever its C library. They
are the same kernels in both `--kernels` modes.

Where a derivative costs almost nothing beside its value (GELU shares one exp), value and derivative are computed
together and joined by `_with_slope`, so that the backward pass is one multiplication.
"""

import mlx.core as mx

# exp(r) on |r| <= ln(2)/2: Cephes expf (S. Moshier), the polynomial after 1 + r + r*r*(...).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which the low bits of the sum then hold.
# Normal distribution function: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17; |error| < 7.5e-8.
_T, _CDF = 0.2316419, (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
_SQRT_1_2PI = 0.3989422804014327


def _with_slope(x: mx.array, value: mx.array, slope: mx.array) -> mx.array:
    """Return `value`, whose derivative by x is `slope`. x - x is an exact 0, and NaN where x is not finite."""
    return mx.stop_gradient(value) + (x - mx.stop_gradient(x)) * mx.stop_gradient(slope)


def exp_nonpositive(x: mx.array) -> mx.array:
    """Return exp(x) for float32 x <= 0, without a gradient. Below -87 it is exp(-87), about 1.6e-38. NaN stays NaN."""
    x = mx.maximum(x, -87.0)
    shifted = x * _LOG2E + _ROUND
    k = shifted - _ROUND
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = r * _EXP[0] + _EXP[1]
    for c in _EXP[2:]:
        p = r * p + c
    power = ((shifted.view(mx.int32) << 23) + 0x3F800000).view(mx.float32)
    return (p * (r * r) + r + 1.0) * power


def gelu(x: mx.array) -> mx.array:
    """Return the exact (not tanh) GELU of x, in x's dtype, computed in float32."""
    v = x.astype(mx.float32)
    t = 1.0 / (1.0 + _T * mx.abs(v))
    density = exp_nonpositive(-0.5 * v * v) * _SQRT_1_2PI
    series = t * _CDF[0] + _CDF[1]
    for c in _CDF[2:]:
        series = t * series + c
    cdf = 0.5 + mx.where(v > 0, 1.0, -1.0) * (0.5 - density * (series * t))
    return _with_slope(v, v * cdf, cdf + v * density).astype(x.dtype)


def _exp_shifted(x: mx.array) -> mx.array:
    """Return exp(x - max(x)) over the last axis, with its gradient (the maximum counts as a constant)."""
    z = x - mx.stop_gradient(x.max(axis=-1, keepdims=True))
    e = exp_nonpositive(z)
    return _with_slope(z, e, e)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal attention of q, k, v (B, H, T, D) with queries aligned to the last keys; softmax in float32."""
    queries, keys = q.shape[-2], k.shape[-2]
    scores = ((q * scale) @ k.swapaxes(-1, -2)).astype(mx.float32)
    allowed = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)[None, :]
    e = _exp_shifted(mx.where(allowed, scores, -1e9))
    return (e * (1.0 / e.sum(axis=-1, keepdims=True))).astype(v.dtype) @ v


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Return -log softmax(logits)[target], float32 (...), of float32 logits (..., V) and integer targets (...)."""
    top = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = mx.log(_exp_shifted(logits).sum(axis=-1))
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)
    return total - (picked - top).squeeze(-1)
