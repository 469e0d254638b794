"""exp2, GELU, softmax attention and cross entropy from plain arithmetic, for MLX's CPU backend.

There the transcendental functions are scalar calls into the host's C library, 15 to 35 ns an element: in a small GPT
they take most of a step. Written as additions, multiplications and divisions, MLX's compiler fuses them into loops that
the host compiler vectorises, at an error below the library's (tests/model/test_fastmath.py holds both against float64),
and the same on every host, whatever its C library. They are the same kernels in both `--kernels` modes.

Rules that keep the loops fast, found by timing and by reading what the compiler makes:
  * No `where`, `maximum` or `minimum` on floats: one of them, and the loop is scalar code, five times slower. `abs`,
    `sign`, division, and any of them on integers are vectorised.
  * MLX fuses at most 11 operations deep, so polynomials are split by halves (Estrin) rather than nested (Horner).
  * An expression that two kernels share is not computed in either but by a third, which writes it to memory. So where
    such a thing is cheap it is written differently on purpose, with another scale or order, and computed twice.
  * A value and its slope are computed together and joined by `_with_slope`: the backward pass is one multiplication.
"""

from collections.abc import Sequence

import mlx.core as mx

# 2**f = 1 + f * poly(f) on |f| <= 1/2: minimax fit of the relative error, degree 6, 2.0e-9 (1.1e-7 in float32).
_EXP2 = (
    0.693147182,
    0.240226477,
    0.0555033237,
    0.00961843785,
    0.00133988762,
    0.000153532266,
)
_LOG2E = 1.4426950408889634
_ROUND = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds to an integer.
# The normal distribution's tail Q(a) = P(X > a) = 1 / (2 * p**16), p = 1 + a/8 * poly(a/8), the form of Abramowitz and
# Stegun, Handbook of Mathematical Functions, 7.1.28, with coefficients of our own: minimax fit of max(a, 1) * Q(a) on
# [0, 9], degree 8, 7.5e-9 (8e-8 in float32). It needs no cut: p grows without bound.
_TAIL = (
    0.398942649,
    1.35277605,
    1.68280804,
    0.125655338,
    1.59779668,
    2.16883993,
    -2.71145916,
    2.88232231,
)
# The density over the tail: a * density(a) / Q(a) - 1 = a**2 + poly(a / (4 + a)): minimax fit of the product with Q on
# [0, 9], degree 6, 8.6e-9 (1e-7 in float32).
_RATIO = (
    -1.0,
    3.19154239,
    -2.62288952,
    -1.45112586,
    1.67299569,
    2.67983127,
    -2.85863447,
)
_MASKED = -1e38  # added to a score: below any other, and far from overflow


def _poly(x: mx.array, coefficients: Sequence[float]) -> mx.array:
    """Return the polynomial by halves: (c0 + c1 x) + x**2 (c2 + c3 x), and so on. Constant term first."""
    terms: list = list(coefficients)
    power = x
    while len(terms) > 1:
        pairs = [low + power * high for low, high in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
        power = power * power
    return terms[0]


def _with_slope(x: mx.array, value: mx.array, slope: mx.array) -> mx.array:
    """Return `value`, whose derivative by x is `slope`. x - x is an exact 0, and NaN where x is not finite."""
    return mx.stop_gradient(value) + (x - mx.stop_gradient(x)) * mx.stop_gradient(slope)


def exp2_nonpositive(x: mx.array) -> mx.array:
    """Return 2**x for float32 x <= 0, without a gradient. Below 2**-126.5 it is an exact 0. NaN stays NaN."""
    # Two kernels, as a change of type (view) is not fused: first 2**k, then all the rest. Both round x to the same k;
    # the order of the operands tells the two expressions apart.
    k = mx.add(x, mx.array(_ROUND)) - _ROUND
    # A k beyond int32 turns into its lowest number, on x86 and ARM alike.
    power = ((mx.maximum(k.astype(mx.int32), -127) + 127) << 23).view(mx.float32)
    f = x - (mx.add(mx.array(_ROUND), x) - _ROUND)
    return (1.0 + f * _poly(f, _EXP2)) * power


def _normal_tail(v: mx.array) -> mx.array:
    """Return P(X > |v|) of a standard normal X, float32; an exact 0 from about |v| = 14 on."""
    a = mx.abs(v * 0.125)
    # p**16 - 1 by four squarings of 1 + e as 1 + e * (e + 2): e keeps the bits that 1 + e would round away.
    e = a * _poly(a, _TAIL)
    for _ in range(4):
        e = e * (e + 2.0)
    return 1.0 / (2.0 + 2.0 * e)


def gelu(x: mx.array) -> mx.array:
    """Return the exact (not tanh) GELU of x, x * P(X < x) with X standard normal, in x's dtype, computed in float32."""
    v = x.astype(mx.float32)
    tail = _normal_tail(v)
    # max(v, 0) - |v| * tail: to the left of 0 as accurate, relatively, as the tail is.
    half = v * 0.5
    value = (half + mx.abs(half)) - mx.abs(half) * (tail + tail)
    # P(X < v) + v * density(v): on the left the tail plus, on the right 1 minus the tail minus ...
    sign, a = mx.sign(v), mx.abs(v)
    signed = sign * tail
    slope = (0.5 + 0.5 * sign) + ((signed * v) * v + signed * _poly(a / (a + 4.0), _RATIO))
    return _with_slope(v, value, slope).astype(x.dtype)


def _exp_shifted(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return exp(x - top), with its gradient by x, and top: the maximum over the last axis, taken as a constant."""
    top = mx.stop_gradient(x.max(axis=-1, keepdims=True))
    e = exp2_nonpositive((x - top) * _LOG2E)
    return _with_slope(x, e, e), top


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array | None = None) -> mx.array:
    """Causal attention of q, k, v (B, H, T, D) with queries aligned to the last keys; softmax in float32.

    `allowed`, bool (B, 1, T, T): the pairs of query and key that count, instead of the causal ones; each query has one.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    scores = ((q * scale) @ k.swapaxes(-1, -2)).astype(mx.float32)
    if allowed is None:
        allowed = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)[None, :]
    # A sum, not a choice: the exponential of a masked score is an exact 0, and so is its gradient.
    e, _ = _exp_shifted(scores + mx.where(allowed, 0.0, _MASKED))
    # Divided after the product with v, which is smaller than the scores.
    out = (e.astype(v.dtype) @ v).astype(mx.float32) * (1.0 / e.sum(axis=-1, keepdims=True))
    return out.astype(v.dtype)


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Return -log softmax(logits)[target], float32 (...), of float32 logits (..., V) and integer targets (...)."""
    e, top = _exp_shifted(logits)
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)
    return mx.log(e.sum(axis=-1)) - (picked - top).squeeze(-1)
