"""What a person needs to know about MLX on this machine, and what to do about it."""

import time
from collections.abc import Mapping
from typing import Any

from mlxdet.backends import Facts, activate, jit
from mlxdet.backends.blas import OWN
from mlxdet.backends.devices import CUDA_WHEELS
from mlxdet.backends.fingerprint import installed


def diagnose(device: str = "auto") -> dict[str, Any]:
    """Return device, versions, BLAS, pins, a measured matrix product, and a list of advice. Activates the device.

    Raises UsageError, as activate() does, if there is no such device.
    """
    backend = activate(device)
    size = 512 if backend.name == "cpu" else 2048
    return {
        "mlxdet": installed("mlxdet"),
        **backend.fingerprint(),
        "pins": dict(backend.pins),
        "matmul_size": size,
        "matmul_gflops": round(matmul_gflops(size), 1),
        "optional": {name: installed(name) for name in ("safetensors", "torch", "grain", "mlx-lm")},
        # On a Mac without developer tools, asking for g++ opens a window that offers to install them.
        "advice": advice(
            backend.name,
            backend.blas,
            jit.compiler() if backend.name == "cpu" else None,
            jit.problem(),
            Facts.here(),
        ),
    }


def matmul_gflops(size: int, repeats: int = 7) -> float:
    """Return the best rate of `repeats` float32 products of two square matrices, in 10**9 operations per second."""
    import mlx.core as mx

    a = mx.random.normal((size, size), key=mx.random.key(0))
    mx.eval(a @ a)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


def advice(
    name: str, blas: Mapping[str, Any], compiler: str | None, cache_problem: str | None, facts: Facts
) -> list[str]:
    """Return what to install or change to be faster or surer, one line each."""
    lines = []
    if facts.system == "Linux":
        if facts.no_gpu is None and not facts.has("cuda"):
            lines.append("An NVIDIA GPU is here but MLX's CUDA backend is not: pip install 'mlxdet[cuda]'")
        if facts.no_gpu is not None and facts.has("cuda"):
            lines.append(f"MLX's CUDA backend is installed, but {facts.no_gpu}")
        if facts.overwritten:
            there = sorted(facts.wheels.intersection((*CUDA_WHEELS, "mlx-cpu")))
            lines.append(
                f"{', '.join(sorted(facts.overwritten))} and {', '.join(there)} write the same library; that of "
                f"{', '.join(there)} is in place. Uninstall both, then install the one you want"
            )
    if name != "cpu":
        return lines
    if blas.get("name") == OWN:
        lines.append(
            f"MLX's own BLAS is in use, and a step takes 8 to 10 times longer: pip install 'mlxdet[cpu]', or install "
            f"libopenblas0, or set MLXDET_BLAS=/path/to/libopenblas.so ({blas.get('why')})"
        )
    if compiler is None:
        lines.append("There is no g++, so MLX fuses nothing: steps are slower, and their bits may differ. Install g++")
    if cache_problem is not None:
        lines.append(f"Every process compiles its kernels anew, which takes a minute: {cache_problem}")
    return lines
