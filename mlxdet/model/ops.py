"""Which kernels the model uses on which device."""

import mlx.core as mx
import mlx.nn as nn

from mlxdet.backends import Backend
from mlxdet.backends.cuda import attention as plain
from mlxdet.backends.cuda import norms
from mlxdet.model import fastmath
from mlxdet.model.gpt import Ops


def _fused_attention(q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array | None = None) -> mx.array:
    mask = "causal" if allowed is None else allowed
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def _causal_fused_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array | None = None
) -> mx.array:
    """Fused under the causal mask. Under a mask of its own (packed rows) from plain operations: which backward pass MLX
    takes for a mask array differs by version and device, while that of two products and a softmax is known."""
    attention = _fused_attention if allowed is None else plain.attention
    return attention(q, k, v, scale, allowed)


def _cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, targets, reduction="none")


def ops_for(backend: Backend) -> Ops:
    """Return the kernels for `backend`: MLX's own, except on the CPU (too slow) and where `backend` says they race."""
    if backend.name == "cpu":
        return Ops(mx.fast.layer_norm, fastmath.attention, fastmath.gelu, fastmath.cross_entropy)
    fused = _fused_attention if backend.kernels == "default" else _causal_fused_attention
    return Ops(
        norms.layer_norm if backend.norms == "plain" else mx.fast.layer_norm,
        plain.attention if backend.attention == "plain" else fused,
        nn.gelu,
        _cross_entropy,
    )
