"""CUDA: the settings that choose kernels."""

from mlxdet.backends.pins import Table


def pins(kernels: str) -> Table:
    """Return what must be set for `kernels`, "deterministic" or "default"."""
    table: dict[str, tuple[str | None, str]] = {
        "MLX_ENABLE_TF32": ("0", "float32 products are otherwise cut to about ten bits"),
    }
    if kernels == "deterministic":
        reason = "the backward pass of cuDNN attention adds with atomics in half precision, so repeated runs differ"
        table["MLX_CUDA_USE_CUDNN_SDPA"] = ("0", reason)
    return table
