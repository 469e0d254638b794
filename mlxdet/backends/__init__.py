"""Devices: what to pin before MLX is imported, which kernels to use, and how to tell one machine from another.

Importing this package does not import MLX: some of its settings are read once, so they are pinned first, in `activate`.
"""

import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mlxdet.backends import cpu, cuda, metal
from mlxdet.errors import UsageError

# Up to this many ids the one-hot product is the fastest deterministic embedding gradient, and the most accurate.
ONEHOT_VOCAB = 1024


@dataclass(frozen=True)
class Facts:
    """What select() decides from; injected in tests."""

    system: str  # "Darwin", "Linux"
    machine: str  # "arm64", "x86_64"
    wheels: frozenset[str]  # installed distributions whose name starts with mlx
    nvidia: bool  # an NVIDIA driver is loaded

    @staticmethod
    def here() -> "Facts":
        names = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in distributions()}
        nvidia = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
        return Facts(platform.system(), platform.machine(), frozenset(n for n in names if n.startswith("mlx")), nvidia)

    def has(self, device: str) -> bool:
        """Return whether MLX's wheel for `device` is installed. A CUDA wheel and the Mac's also run on the CPU."""
        if self.system == "Darwin":
            return "mlx" in self.wheels and (device == "cpu" or (device == "metal" and self.machine == "arm64"))
        on_cuda = bool(self.wheels & {"mlx-cuda", "mlx-cuda-12", "mlx-cuda-13"})
        return {"metal": False, "cuda": on_cuda, "cpu": on_cuda or "mlx-cpu" in self.wheels}[device]


@dataclass(frozen=True)
class Backend:
    """A device with its choices made. MLX is imported and set to it when activate() returns one."""

    name: str  # "metal", "cuda" or "cpu"
    kernels: str  # "deterministic" or "default"
    pins: Mapping[str, str | None] = field(default_factory=dict)  # environment variables in force; None: unset
    blas: Mapping[str, Any] = field(default_factory=dict)  # CPU: which BLAS multiplies matrices

    @property
    def norms(self) -> str:
        """Return "plain" where MLX's fused norms race in shared memory (CUDA), else "fast"."""
        return "plain" if self.name == "cuda" and self.kernels == "deterministic" else "fast"

    @property
    def attention(self) -> str:
        """Return "plain" where MLX's fused attention races in its backward pass (CUDA), else "fast"."""
        return "plain" if self.name == "cuda" and self.kernels == "deterministic" else "fast"

    def embedding_method(self, vocab: int, tokens: int) -> str:
        """Return the method of model.embedding for a table of `vocab` rows and `tokens` ids in a micro-batch."""
        if vocab <= ONEHOT_VOCAB:
            return "onehot"
        return "scatter" if self.name == "cpu" else "fixedpoint"

    def fingerprint(self) -> dict[str, Any]:
        """Return {"decides": what may change bits, "notes": what does not}; JSON-able, without time, host or paths."""
        from mlxdet.backends.fingerprint import fingerprint

        return fingerprint(self)


def select(device: str = "auto", facts: Facts | None = None) -> str:
    """Return "metal", "cuda" or "cpu" for `device` ("auto" or one of them), without importing MLX.

    Raises UsageError, naming the extra to install, if MLX has no such backend here.
    """
    facts = facts or Facts.here()
    if "mlx" not in facts.wheels:
        raise UsageError(f"MLX is not installed; {_install(facts, device)}")
    if device == "auto":
        order = ["metal", "cuda", "cpu"]
        found = [d for d in order if facts.has(d) and (d != "cuda" or facts.nvidia)]
        if not found:
            raise UsageError(f"MLX has no backend installed; {_install(facts, device)}")
        return found[0]
    if device == "metal" and facts.system != "Darwin":
        raise UsageError(f"--device metal: this is {facts.system}; Metal is on Apple silicon only")
    if device == "cuda" and facts.system != "Linux":
        raise UsageError(f"--device cuda: this is {facts.system}; MLX runs on CUDA under Linux only")
    if not facts.has(device):
        raise UsageError(f"--device {device}: MLX has no {device} backend installed; {_install(facts, device)}")
    if device == "cuda" and not facts.nvidia:
        raise UsageError("--device cuda: no NVIDIA driver is loaded on this machine")
    return device


def _install(facts: Facts, device: str) -> str:
    if facts.system == "Darwin":
        return "pip install mlxdet"
    if device == "cuda" or (device == "auto" and facts.nvidia):
        return "pip install 'mlxdet[cuda]'"
    return "pip install 'mlxdet[cpu]'"


_TABLES: dict[str, Callable[[str], dict[str, tuple[str | None, str]]]] = {
    "metal": metal.pins,
    "cuda": cuda.pins,
    "cpu": cpu.pins,
}
_lock = threading.Lock()
_active: Backend | None = None


def activate(device: str = "auto", kernels: str = "deterministic") -> Backend:
    """Pin the environment, load a BLAS (CPU), import MLX, make `device` its default, and return the backend.

    Idempotent and thread-safe; the pins stay for the life of the process. Raises UsageError if a pinned variable has
    another value, or if MLX was imported before it was pinned.
    """
    global _active
    with _lock:
        name = select(device)
        if _active is not None and (_active.name, _active.kernels) == (name, kernels):
            _use(name)
            return _active
        table = _TABLES[name](kernels)
        _pin(table, "mlx.core" in sys.modules and _active is None)
        blas: Mapping[str, Any] = _active.blas if _active is not None else {}
        if platform.system() == "Linux" and not blas:
            blas = _load_blas(name)
        if name == "cpu":
            cpu.private_jit_cache()
        try:
            _use(name)
        except ImportError as error:
            raise UsageError(f"MLX cannot be loaded ({error}); {_install(Facts.here(), name)}") from None
        _active = Backend(name, kernels, {k: v for k, (v, _) in table.items()}, blas)
        return _active


def _load_blas(name: str) -> Mapping[str, Any]:
    from mlxdet.backends import blas

    if name != "cpu":
        return {}
    late = "mlx.core" in sys.modules
    found = blas.own("MLX was imported before mlxdet could load one") if late else blas.load()
    if late:
        if os.environ.get("MLXDET_BLAS", "none") != "none":
            raise UsageError("MLXDET_BLAS comes too late, MLX is already imported; import mlxdet and train first")
        warnings.warn("MLX was imported before mlxdet, so its own slow BLAS is used", RuntimeWarning, stacklevel=4)
    return found


def _pin(table: Mapping[str, tuple[str | None, str]], late: bool) -> None:
    """Check every pin, then set them all."""
    for variable, (value, reason) in table.items():
        have = os.environ.get(variable)
        if have is not None and have != value:
            want = "be unset" if value is None else f"be {value}"
            raise UsageError(f"{variable}={have} is set, but must {want}: {reason}. Unset it")
        if late and have != value:
            raise UsageError(
                f"{variable}={value} comes too late: MLX is already imported. Set it before Python starts, or call "
                f"mlxdet before importing mlx ({reason})"
            )
    for variable, (value, _) in table.items():
        if value is not None:
            os.environ[variable] = value


def _use(name: str) -> None:
    import mlx.core as mx

    mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)
