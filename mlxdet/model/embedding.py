"""The gradient of an embedding table without float atomics: d_table[v] = sum of d_e[n] over all n with ids[n] == v.

MLX computes this sum with a scatter whose float additions race on Metal and CUDA: an id that occurs three times or more
gets its addends in the order the hardware likes, and in bfloat16 it also accumulates in bfloat16 (5 % error on frequent
tokens). Each method here adds in an order fixed by the program, or adds integers, whose order does not matter; all
accumulate in float32. Which one a device uses is `Backend.embedding_method`.

  onehot      matmul with the one-hot matrix; 2*V*N*D flop, so for small vocabularies.
  fixedpoint  integer scatter: every row of the table gets its own power-of-two scale from its largest addend, addends
              are cut into integer limbs, limbs are added by an integer scatter. Bits do not depend on the order of the
              tokens at all. Relative to the row's largest addend the error is below 2**-32, so a rare token keeps its
              accuracy beside a frequent one (Adam divides by the row's own size).
  doubling    sort, then segmented sums by doubling; elementwise only, for devices without integer scatter.
  scatter     MLX's own in float32: for the CPU, where it is a sequential loop.
"""

from collections.abc import Callable

import mlx.core as mx


def onehot(ids: mx.array, grad: mx.array, vocab: int) -> mx.array:
    """ids (N,), grad (N, D) -> float32 (vocab, D). TF32 must be off, or the product is cut to ten bits."""
    hot = (mx.arange(vocab, dtype=ids.dtype)[:, None] == ids[None, :]).astype(mx.float32)
    return hot @ grad.astype(mx.float32)


def scatter(ids: mx.array, grad: mx.array, vocab: int) -> mx.array:
    """ids (N,), grad (N, D) -> float32 (vocab, D). Deterministic only where scatters run in sequence (CPU)."""
    return mx.zeros((vocab, grad.shape[1]), mx.float32).at[ids].add(grad.astype(mx.float32))


def _pow2(exponent: mx.array) -> mx.array:
    """2.0**exponent for int32 exponents in [-126, 127], from the bits: exact on every device, unlike mx.power."""
    return ((exponent + 127) << 23).view(mx.float32)


def limbs(tokens: int) -> tuple[int, int]:
    """Return (bits per limb, number of limbs) such that `tokens` limbs never overflow int32 and all hold >= 32 bits."""
    bits = 30 - max(13, (tokens - 1).bit_length())
    if bits < 4:
        raise ValueError(
            f"a step of {tokens} tokens is too many for the fixed-point embedding gradient (2**26 at most)"
        )
    return bits, -(-32 // bits)


def fixedpoint(ids: mx.array, grad: mx.array, vocab: int) -> mx.array:
    """ids (N,), grad (N, D) -> float32 (vocab, D). A non-finite addend makes its row NaN. N <= 2**26."""
    n, width = grad.shape
    bits, count = limbs(n)
    g = grad.astype(mx.float32)
    # Largest addend of each destination row. Bits of non-negative floats order like integers, and max is order-free.
    size = mx.zeros((vocab,), mx.int32).at[ids].maximum(mx.abs(g).max(axis=1).view(mx.int32))
    # |addend| < 2**exponent. The clip keeps both powers of two normal; a row of denormals is then cut at 2**-126.
    exponent = mx.clip(((size >> 23) & 255) - 126, bits - 126, 127)
    up, down = _pow2(bits - exponent[ids])[:, None], _pow2(exponent - bits)[:, None]
    # 2**-bits * 2**bits limbs: each scaled remainder is below 1/2 in size and exact, as scales are powers of two.
    rest, total = g * up, mx.zeros((vocab, width), mx.float32)
    parts = []
    for _ in range(count):
        limb = mx.round(rest)
        rest = (rest - limb) * float(2**bits)
        parts.append(mx.zeros((vocab, width), mx.int32).at[ids].add(limb.astype(mx.int32)))
    for part in reversed(parts):
        total = total * float(2.0**-bits) + part.astype(mx.float32)
    # Exponent 255 means infinity or NaN among the addends; integers cannot carry it.
    return mx.where((size >= 0x7F800000)[:, None], float("nan"), total * down)


def doubling(ids: mx.array, grad: mx.array, vocab: int) -> mx.array:
    """ids (N,), grad (N, D) -> float32 (vocab, D). ceil(log2 N) passes; vocab * N < 2**32."""
    n = ids.shape[0]
    if vocab * n >= 1 << 32:
        raise ValueError(f"vocabulary {vocab} times {n} tokens is too large for 32-bit sort keys")
    key = mx.sort(ids.astype(mx.uint32) * n + mx.arange(n, dtype=mx.uint32))  # unique keys: one order everywhere
    rows, x = key // n, grad[key % n].astype(mx.float32)
    k = 1
    while k < n:
        same = (rows[k:] == rows[:-k])[:, None]
        x = mx.concatenate([x[:-k] + mx.where(same, x[k:], 0.0), x[-k:]], axis=0)
        k *= 2
    every = mx.arange(vocab, dtype=mx.uint32)
    # First position of each id, by counting: how many sorted rows are smaller. searchsorted is not in every MLX.
    start = mx.minimum((rows[None, :] < every[:, None]).sum(axis=1), n - 1)
    return mx.where((rows[start] == every)[:, None], x[start], 0.0)


METHODS: dict[str, Callable[[mx.array, mx.array, int], mx.array]] = {
    "onehot": onehot,
    "fixedpoint": fixedpoint,
    "doubling": doubling,
    "scatter": scatter,
}


def segment_sum(method: str, ids: mx.array, grad: mx.array, vocab: int) -> mx.array:
    """ids (...), grad (..., D) -> float32 (vocab, D): the sum of the rows of grad over equal ids, by `method`."""
    return METHODS[method](ids.reshape(-1), grad.reshape(-1, grad.shape[-1]), vocab)
