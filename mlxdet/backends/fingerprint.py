"""What a run was computed on: what may change bits, apart from what cannot."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlxdet.backends import Backend, cpu

# MLX_ variables that change the schedule or the memory, never the bits of a program without races.
HARMLESS = {
    "MLX_BFS_MAX_WIDTH",
    "MLX_MAX_OPS_PER_BUFFER",
    "MLX_MAX_MB_PER_BUFFER",
    "MLX_METAL_FAST_SYNCH",
    "MLX_USE_CUDA_GRAPHS",
    "MLX_CUDA_GRAPH_CACHE_SIZE",
    "MLX_PTX_CACHE_DIR",
}


def fingerprint(backend: Backend) -> dict[str, Any]:
    """Return {"decides": ..., "notes": ...} of the active backend; JSON-able, no time, host name or user path."""
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MLX_")}
    decides: dict[str, Any] = {
        "device": backend.name,
        "mlx": _version("mlx"),
        "system": platform.system(),
        "machine": platform.machine(),
        "variables": {k: v for k, v in variables.items() if k not in HARMLESS},
    }
    notes: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "variables": {k: v for k, v in variables.items() if k in HARMLESS},
    }
    if backend.name == "cpu":
        decides |= {"compiler": cpu.compiler(), "libc": " ".join(platform.libc_ver()), "processor": _processor()}
        decides["blas"] = {k: v for k, v in backend.blas.items() if k != "why"} or {"name": "Accelerate"}
        notes["blas_from"] = backend.blas.get("why", "the system")
    else:
        decides |= _gpu(backend.name)
    if sys.platform == "darwin":
        decides["macos"] = platform.mac_ver()[0]
    return {"decides": decides, "notes": notes}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the model of the processor: BLAS and C library choose their code by it."""
    if sys.platform == "darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def _gpu(name: str) -> dict[str, Any]:
    """Return chip and driver as MLX and the vendor's tool tell them."""
    import mlx.core as mx

    wanted = ("device_name", "architecture", "compute_capability_major", "compute_capability_minor", "sm_count")
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    told: dict[str, Any] = {k: info[k] for k in wanted if k in info}
    if name == "cuda":
        query = _run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"])
        told |= {"nvidia": query, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    return {"gpu": told}


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
