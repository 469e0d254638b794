"""mlxdet: train a small GPT on MLX so that the same seed gives the same bits, and prove it or say where it breaks.

Importing this package imports neither MLX nor numpy: names are loaded when they are first used, and MLX only after the
backend has pinned its environment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxdet import nn
    from mlxdet.auditing.audit import audit
    from mlxdet.auditing.report import Audit
    from mlxdet.config import TrainConfig
    from mlxdet.errors import Fault, MlxdetError, UsageError
    from mlxdet.measure.compare import assert_identical, compare
    from mlxdet.measure.divergence import diverge
    from mlxdet.measure.repeatable import assert_repeatable
    from mlxdet.nn import make_deterministic
    from mlxdet.seeds import BatchRng, Splitmix64, batch_rng, parse_seed, seed_everything, stream
    from mlxdet.training.fork import fork
    from mlxdet.training.loop import resume, train
    from mlxdet.training.run import Run

__all__ = [
    "Audit",
    "BatchRng",
    "Fault",
    "MlxdetError",
    "Run",
    "Splitmix64",
    "TrainConfig",
    "UsageError",
    "assert_identical",
    "assert_repeatable",
    "audit",
    "batch_rng",
    "compare",
    "diverge",
    "fork",
    "make_deterministic",
    "nn",
    "parse_seed",
    "resume",
    "seed_everything",
    "stream",
    "train",
]

_HOME = {
    "mlxdet.auditing.audit": ("audit",),
    "mlxdet.auditing.report": ("Audit",),
    "mlxdet.config": ("TrainConfig",),
    "mlxdet.errors": ("Fault", "MlxdetError", "UsageError"),
    "mlxdet.measure.compare": ("assert_identical", "compare"),
    "mlxdet.measure.divergence": ("diverge",),
    "mlxdet.measure.repeatable": ("assert_repeatable",),
    "mlxdet.nn": ("make_deterministic",),
    "mlxdet.seeds": ("BatchRng", "Splitmix64", "batch_rng", "parse_seed", "seed_everything", "stream"),
    "mlxdet.training.fork": ("fork",),
    "mlxdet.training.loop": ("resume", "train"),
    "mlxdet.training.run": ("Run",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module("mlxdet.nn")
    if name not in _MODULE:
        raise AttributeError(f"module 'mlxdet' has no attribute {name!r}")
    value = getattr(import_module(_MODULE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
