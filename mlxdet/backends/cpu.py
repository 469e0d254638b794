"""The CPU: no setting chooses kernels; what decides bits is the BLAS (blas.py) and the compiler (jit.py)."""

from mlxdet.backends.pins import Table


def pins(kernels: str) -> Table:
    """Return what must be set for `kernels`: nothing. MLX's CPU backend reads no variable that changes bits but
    MLX_DISABLE_COMPILE, which is recorded."""
    return {}
