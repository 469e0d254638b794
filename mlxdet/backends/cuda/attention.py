"""Causal attention from two products and a softmax, without the racing backward pass of the fused kernel."""

import mlx.core as mx


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array | None = None) -> mx.array:
    """Return causal attention, (B, H, Tq, D), of q (B, H, Tq, D) and k, v (B, H, Tk, D), in v's dtype.

    The last query is aligned with the last key, so Tq <= Tk; else ValueError. The softmax is computed in float32 from
    scores of q's dtype, as in MLX's own unfused path. `allowed`, bool (B, 1, Tq, Tk): the pairs of query and key that
    count, instead of the causal ones; each query has one.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if queries > keys:
        raise ValueError(f"{queries} queries have only {keys} keys to look at")
    scores = ((q * scale) @ k.swapaxes(-1, -2)).astype(mx.float32)
    if allowed is None:
        allowed = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)[None, :]
    return mx.softmax(mx.where(allowed, scores, -1e9), axis=-1).astype(v.dtype) @ v
