"""What a person needs to know about MLX on this machine, and what to do about it."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlxdet.backends import Facts, activate, cpu


def diagnose(device: str = "auto") -> dict[str, Any]:
    """Return device, versions, BLAS, pins, a measured matrix product, and a list of advice. Activates the device."""
    backend = activate(device)
    import mlx.core as mx

    n = 1024 if backend.name != "cpu" else 512
    a = mx.ones((n, n))
    mx.eval(a @ a)
    best = 1e9
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - began)
    report: dict[str, Any] = {
        "mlxdet": _installed("mlxdet"),
        **backend.fingerprint(),
        "pins": dict(backend.pins),
        "matmul_gflops": round(2 * n**3 / best / 1e9, 1),
        "optional": {name: _installed(name) for name in ("safetensors", "torch", "grain", "mlx-lm")},
    }
    report["advice"] = advice(backend.name, dict(backend.blas), cpu.compiler(), Facts.here())
    return report


def advice(name: str, blas: dict[str, Any], compiler: str | None, facts: Facts) -> list[str]:
    """Return what to install or change to be faster or surer, one line each."""
    lines = []
    if facts.system == "Linux" and facts.nvidia and not facts.has("cuda"):
        lines.append("An NVIDIA GPU is here but MLX's CUDA backend is not: pip install 'mlxdet[cuda]'")
    if name == "cpu" and facts.system == "Linux":
        if blas.get("name") == "MLX's own":
            lines.append(
                f"MLX's own BLAS is in use ({blas.get('why')}), 8 to 10 times slower: pip install 'mlxdet[cpu]', or "
                f"install libopenblas0, or set MLXDET_BLAS=/path/to/libopenblas.so"
            )
        if compiler is None:
            lines.append("There is no g++, so MLX fuses nothing and every step is slower: install g++")
    return lines


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
