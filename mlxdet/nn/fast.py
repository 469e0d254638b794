"""Those functions of `mx.fast` that race on a GPU, from plain operations: same arguments, shapes and dtypes.

`rms_norm` and `layer_norm` are for CUDA (see `mlxdet.backends.cuda.norms`), `gated_delta_update` for Metal, where the
gradient of the fused kernel adds to the gradients of q, k, the decay and beta with float atomics.
"""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from mlxdet.backends.cuda import norms


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    """x (..., D), weight (D,) or None -> the RMSNorm over the last axis, in the wider dtype of x and weight."""
    with mx.stream(stream) if stream else nullcontext():
        return norms.rms_norm(_widened(x, weight), _given(weight, 1.0), eps)


def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
) -> mx.array:
    """x (..., D), weight and bias (D,) or None -> the LayerNorm over the last axis, in the widest dtype."""
    with mx.stream(stream) if stream else nullcontext():
        # x + -0.0 is x, the sign of a zero included.
        return norms.layer_norm(_widened(x, weight, bias), _given(weight, 1.0), _given(bias, -0.0), eps)


def _widened(x: mx.array, *parameters: mx.array | None) -> mx.array:
    for p in parameters:
        x = x if p is None else x.astype(mx.result_type(x, p))
    return x


def _given(parameter: mx.array | None, otherwise: float) -> mx.array:
    return mx.array(otherwise) if parameter is None else parameter


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gamma: mx.array,
    beta: mx.array,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    stream: Any = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule, one position after the other (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).

    q, k (B, T, Hk, Dk); v (B, T, Hv, Dv); gamma, the decay, (B, T, Hv) or (B, T, Hv, Dk); beta (B, T, Hv); state
    (B, Hv, Dv, Dk), zeros if None; mask (B, T), False where a position leaves the state alone and puts out zeros.
    Returns (output (B, T, Hv, Dv) in q's dtype, the last state).
    """
    with mx.stream(stream) if stream else nullcontext():
        (b, t, _, width), (heads, depth) = q.shape, v.shape[-2:]
        q, k = (mx.repeat(a, heads // a.shape[2], axis=2) for a in (q, k))
        state = mx.zeros((b, heads, depth, width), mx.float32) if initial_state is None else initial_state
        decay = (gamma if gamma.ndim == 4 else gamma[..., None])[..., None, :]
        outputs = []
        for i in range(t):
            decayed = state * decay[:, i]
            recalled = (decayed * k[:, i, :, None]).sum(axis=-1)
            delta = (v[:, i] - recalled) * beta[:, i, :, None]
            updated = decayed + k[:, i, :, None] * delta[..., None]
            y = (updated * q[:, i, :, None]).sum(axis=-1)
            if mask is not None:
                live = mask[:, i, None, None]
                y, updated = mx.where(live, y, 0), mx.where(live[..., None], updated, state)
            outputs.append(y.astype(q.dtype))
            state = updated
        return mx.stack(outputs, axis=1), state
