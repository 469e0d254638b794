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
from typing import Any

from mlxdet.backends import cpu, cuda, metal, pins
from mlxdet.backends.devices import Facts, select
from mlxdet.errors import UsageError

__all__ = ["KERNELS", "ONEHOT_VOCAB", "Backend", "Facts", "activate", "select"]

KERNELS = ("deterministic", "default")
# Up to this many ids the one-hot product is the fastest deterministic embedding gradient, and the most accurate.
ONEHOT_VOCAB = 1024


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


_TABLES: dict[str, Callable[[str], pins.Table]] = {"metal": metal.pins, "cuda": cuda.pins, "cpu": cpu.pins}
_lock = threading.Lock()
_active: Backend | None = None


def activate(device: str = "auto", kernels: str = "deterministic") -> Backend:
    """Pin the environment, load a BLAS (CPU), import MLX, make `device` its default, and return the backend.

    Idempotent and thread-safe; the pins stay for the life of the process. Raises UsageError if MLX has no such backend
    here, if a pinned variable has another value, or if MLX was imported before it was pinned.
    """
    global _active
    if kernels not in KERNELS:
        raise UsageError(f"--kernels {kernels}: it is {' or '.join(KERNELS)}")
    with _lock:
        facts = Facts.here()
        name = select(device, facts)
        if _active is not None and (name, kernels) == (_active.name, _active.kernels):
            _use(name)  # the user may have changed MLX's default device since
            return _active
        imported = "mlx.core" in sys.modules
        in_force = pins.apply(_TABLES[name](kernels), kernels, too_late=imported and _active is None)
        blas = _prepare_cpu(imported) if name == "cpu" else {}
        try:
            _use(name)
        except ImportError as error:
            raise UsageError(f"MLX cannot be loaded ({error}); {facts.remedy(name)}") from None
        except ValueError as error:  # the wheel is there, the driver too, and still no GPU for MLX
            raise UsageError(f"--device {name}: MLX cannot use it ({error})") from None
        _active = Backend(name, kernels, in_force, blas)
        return _active


def _prepare_cpu(imported: bool) -> Mapping[str, Any]:
    """Give the process its own place to compile in and, on Linux, load a BLAS and return its description."""
    from mlxdet.backends import blas, jit

    jit.start()
    if platform.system() != "Linux":
        return {}
    found = blas.load(too_late=imported)
    if imported and found["name"] == blas.OWN and os.environ.get("MLXDET_BLAS") != "none":
        warnings.warn(f"{found['why']}, so its own is used", RuntimeWarning, stacklevel=4)
    return found


def _use(name: str) -> None:
    import mlx.core as mx

    mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)
