"""What a run was computed on: what may change bits, apart from what cannot.

Two runs whose "decides" differ were made in different environments; if they part, that is the reason to look at first.
Nothing in it depends on time, host, user or path, so that equal machines have equal fingerprints.
"""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlxdet.backends import Backend, jit
from mlxdet.backends.devices import CUDA_WHEELS

# MLX_ variables that change the schedule, the memory, a place or a rank, never the bits of a program without races. Any
# other is taken to decide.
HARMLESS = frozenset(
    {
        "MLX_BFS_MAX_WIDTH",
        "MLX_MAX_OPS_PER_BUFFER",
        "MLX_MAX_MB_PER_BUFFER",
        "MLX_METAL_FAST_SYNCH",
        "MLX_RESIDENCY_SET_MAX_PCT",
        "MLX_RESIDENCY_DEBUG",
        "MLX_USE_CUDA_GRAPHS",
        "MLX_SAVE_CUDA_GRAPHS_DOT_FILE",
        "MLX_CUDA_GRAPH_CACHE_SIZE",
        "MLX_CUDA_SDPA_CACHE_SIZE",
        "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE",
        "MLX_CUDA_CONV_CACHE_SIZE",
        "MLX_CUDA_FFT_CACHE_SIZE",
        "MLX_ENABLE_CACHE_THRASHING_CHECK",
        "MLX_PTX_CACHE_DIR",
        "MLX_HOSTFILE",
        "MLX_MPI_LIBNAME",
        "MLX_NCCL_TIMEOUT",
        "MLX_RANK",
        "MLX_RING_VERBOSE",
        "MLX_WORLD_SIZE",
    }
)
# Libraries that MLX's CUDA kernels call or are compiled by.
CUDA_LIBRARIES = ("cublas", "cudnn", "cuda-nvrtc", "cuda-runtime", "nccl")
_SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def fingerprint(backend: Backend) -> dict[str, Any]:
    """Return {"decides": ..., "notes": ...} of the active backend: JSON-able, keys sorted."""
    decides: dict[str, Any] = {
        "device": backend.name,
        "machine": platform.machine(),
        "mlx": installed("mlx"),
        "system": platform.system(),
        "variables": variables(decisive=True),
    }
    notes: dict[str, Any] = {
        "numpy": installed("numpy"),
        "python": platform.python_version(),
        "system_release": platform.release(),
        "variables": variables(decisive=False),
    }
    if platform.system() == "Darwin":
        decides["macos"] = platform.mac_ver()[0]
    if backend.name == "cpu":
        decides |= {
            "blas": {k: v for k, v in backend.blas.items() if k != "why"} or {"name": "Accelerate"},
            "compiler": jit.compiler(),
            "libc": " ".join(platform.libc_ver()),
            "processor": _processor(),
            "processor_features": " ".join(jit.processor_features()),
        }
        notes["blas_why"] = backend.blas.get("why", "MLX is linked to it")
    else:
        decides["gpu"] = _gpu()
        if backend.name == "cuda":
            decides["cuda"] = _cuda()
    return {"decides": dict(sorted(decides.items())), "notes": dict(sorted(notes.items()))}


def variables(decisive: bool) -> dict[str, str]:
    """Return the MLX_ variables that are set and may change bits (`decisive`), or those that cannot."""
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MLX_") and (k not in HARMLESS) == decisive}
    return {k: _without_path(v) for k, v in chosen.items()}


def _without_path(value: str) -> str:
    """Return `value`, or a digest of it if it is a path, which may name a user: it tells two apart as well."""
    return f"path:{hashlib.blake2b(value.encode(), digest_size=8).hexdigest()}" if "/" in value else value


def installed(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the model of the processor: BLAS and C library choose their code by it."""
    if platform.system() == "Darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "CPU part")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _gpu() -> dict[str, Any]:
    """Return what MLX tells of its GPU that chooses kernels."""
    import mlx.core as mx

    wanted = ("device_name", "architecture", "compute_capability_major", "compute_capability_minor")
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    return {k: info[k] for k in wanted if k in info}


def _cuda() -> dict[str, Any]:
    """Return driver, number of multiprocessors (a MIG slice has fewer) and library versions."""
    told: dict[str, Any] = {"driver": _driver()}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, count = ctypes.c_int(0), ctypes.c_int(0)
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
            cuda.cuDeviceGetAttribute(ctypes.byref(count), _SM_COUNT, device)
            told["multiprocessors"] = count.value
    except OSError:
        pass
    names = [*CUDA_WHEELS, *(f"nvidia-{n}{suffix}" for n in CUDA_LIBRARIES for suffix in ("", "-cu12", "-cu13"))]
    told["libraries"] = {name: v for name in sorted(names) if (v := installed(name)) is not None}
    return dict(sorted(told.items()))


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read())
    except OSError:
        found = None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return found.group(0) if found else _run(query)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
