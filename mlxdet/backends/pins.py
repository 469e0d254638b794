"""Environment variables that MLX reads once: checked first, then set, never changed behind the user's back.

A table maps a variable to (value, reason); the value None means that it must not be set. Each backend has one. With
deterministic kernels a variable that the user has set otherwise is refused; with default kernels the user's value stays
(the fingerprint records it).

What mlxdet sets is inherited by the processes it starts. The variable MLXDET_PINNED tells them which settings are not
the user's, so that a run with default kernels, started by one with deterministic kernels, is not held to its pins.
"""

import os
from collections.abc import Mapping

from mlxdet.errors import UsageError

Table = Mapping[str, tuple[str | None, str]]

MARK = "MLXDET_PINNED"
_set_here: dict[str, str] = {}  # what this process set; it stays set, as MLX may have read it


def apply(table: Table, kernels: str, too_late: bool) -> dict[str, str | None]:
    """Check every pin of `table`, set them all, and return the values in force.

    `too_late`: MLX was imported without mlxdet, so that it may have read its variables already. Raises UsageError, with
    nothing set, if a variable has another value or would be set too late.
    """
    inherited = _inherited(os.environ)
    kept = {**_set_here, **inherited} if too_late else _set_here
    if table:  # the CPU has no pins, so none to disagree with
        for variable in sorted(kept.keys() - table.keys()):
            raise UsageError(
                f"{variable}={kept[variable]} was set for other kernels, and MLX reads it once: "
                f"run --kernels {kernels} in a process of its own"
            )
    environment = {k: v for k, v in os.environ.items() if too_late or k not in inherited}
    to_set: dict[str, str] = {}
    for variable, (value, reason) in table.items():
        have = environment.get(variable)
        if have == value or (have is not None and kernels == "default"):
            continue
        if have is not None:
            want = "must not be set" if value is None else f"must be {value}"
            raise UsageError(
                f"{variable}={have} is set, but {want}: {reason}. Unset it, or keep it with --kernels default"
            )
        assert value is not None  # have is None here, and differs from it
        if too_late:
            raise UsageError(
                f"{variable}={value} comes too late, as MLX is already imported ({reason}): call mlxdet before you "
                f"import mlx, or set the variable before Python starts"
            )
        to_set[variable] = value
    if not too_late:
        for variable in inherited:
            del os.environ[variable]
        os.environ.pop(MARK, None)
    os.environ.update(to_set)
    _set_here.update(to_set)
    if _set_here:
        os.environ[MARK] = ",".join(f"{k}={v}" for k, v in sorted(_set_here.items()))
    return {variable: os.environ.get(variable) for variable in sorted(table)}


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with their values, that a parent process set and not the user."""
    told = dict(pair.split("=", 1) for pair in environment.get(MARK, "").split(",") if "=" in pair)
    return {k: v for k, v in told.items() if k not in _set_here and environment.get(k) == v}
