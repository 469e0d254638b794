"""`mlx.nn.LayerNorm` and `mlx.nn.RMSNorm` from plain operations, for CUDA: same constructors, parameters, dtypes."""

import mlx.core as mx
import mlx.nn

from mlxdet.nn import fast


class LayerNorm(mlx.nn.LayerNorm):
    """`mlx.nn.LayerNorm` without the fused kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) -> the same shape."""
        return fast.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)


class RMSNorm(mlx.nn.RMSNorm):
    """`mlx.nn.RMSNorm` without the fused kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) -> the same shape."""
        return fast.rms_norm(x, self.weight, self.eps)
