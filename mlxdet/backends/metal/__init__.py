"""Metal (Apple silicon): the settings that choose kernels."""

from mlxdet.backends.pins import Table

_SDPA = "it chooses another attention kernel, which gives other bits"


def pins(kernels: str) -> Table:
    """Return what must be set for `kernels`: the same for both kinds."""
    return {
        "MLX_ENABLE_TF32": ("0", "on M5 and later float32 products are otherwise cut to about ten bits"),
        "MLX_SDPA_VJP_FALLBACK": (None, _SDPA),
        "MLX_SDPA_VJP_BLOCK": (None, _SDPA),
        "MLX_SDPA_VJP_BQ": (None, _SDPA),
        "MLX_SDPA_VJP_BK": (None, _SDPA),
        "MLX_SDPA_BLOCKS": (None, _SDPA),
        "MLX_SDPA_PAD_HEAD_DIM": (None, _SDPA),
        "MLX_SDPA_D512_MIN_KL": (None, _SDPA),
        "MLX_METAL_GPU_ARCH": (None, "it makes MLX choose the kernels of another chip"),
    }
