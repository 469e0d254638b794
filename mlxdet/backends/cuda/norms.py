"""LayerNorm and RMSNorm from plain operations.

MLX's fused CUDA norms use one piece of shared memory for two reductions with one barrier between them where two are
needed: a fast warp's second write can overtake a slow warp's first read. Reductions and elementwise operations have no
such race, and neither has what autodiff makes of them.
"""

import mlx.core as mx


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array, eps: float) -> mx.array:
    """Return the LayerNorm of x (..., D) over its last axis, in x's dtype; float32 inside. weight and bias: (D,)."""
    wide = x.astype(mx.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    scale = mx.rsqrt(mx.square(centred).mean(axis=-1, keepdims=True) + eps)
    return (centred * scale * weight.astype(mx.float32) + bias.astype(mx.float32)).astype(x.dtype)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return the RMSNorm of x (..., D) over its last axis, in x's dtype; float32 inside. weight: (D,)."""
    wide = x.astype(mx.float32)
    scale = mx.rsqrt(mx.square(wide).mean(axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(mx.float32)).astype(x.dtype)
