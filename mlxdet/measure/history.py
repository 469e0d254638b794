"""What a run logged, step by step, as the run is now or as it was before a rollback. Reads; does not import MLX."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.training.detours import Detour
from mlxdet.training.run import EVENTS, METRICS, Run, lines, timeline


@dataclass(frozen=True)
class History:
    """The logged steps of one branch of a run, and the detours that led to it.

    Branch 0 is the run before any rollback, branch n after the n-th. `records` has the lines of metrics.jsonl by step;
    a step that stopped the run for not being finite has no line there, so its entry comes from the events.
    """

    path: Path
    records: dict[int, dict[str, Any]]
    detours: tuple[Detour, ...]

    @property
    def branch(self) -> int:
        return len(self.detours)

    def before(self, step: int) -> list[dict[str, Any]]:
        """Return the records of earlier steps, in order."""
        return [r for s, r in self.records.items() if s < step]

    def require(self, step: int) -> dict[str, Any]:
        """Return the record of `step`. Raises UsageError where there is none."""
        if step not in self.records:
            steps = self.records
            has = f"it has steps {min(steps)} to {max(steps)}" if steps else "nothing is logged yet"
            raise UsageError(f"{self.path}: step {step} is not in the log; {has}")
        return self.records[step]


def history(run: Run, branch: int | None = None) -> History:
    """Return the history of `run` on `branch` (default: the newest). Raises UsageError, with the line, on a bad log."""
    logged = lines(run.path / METRICS)
    every = run.rollbacks(logged)
    if branch is not None and not 0 <= branch <= len(every):
        raise UsageError(f"--detour: {branch} is not one of this run's; it has had {len(every)} rollbacks")
    chosen = len(every) if branch is None else branch
    kept = timeline(r for r in logged if r.get("detour", 0) <= chosen)
    records = {r["step"]: r for r in kept}
    for e in lines(run.path / EVENTS):
        own = e["event"] in ("non-finite", "spike") and e.get("detour", 0) == chosen
        if own and e["step"] == max(records, default=0) + 1:
            stopped = {"loss": float(e["loss"]), "grad_norm": float(e["grad_norm"])}
            if not all(map(math.isfinite, stopped.values())):
                records[e["step"]] = {"step": e["step"], **stopped, "rows": e["rows"]}
                break
    # A detour has begun when a step of it is logged.
    begun = max((r.get("detour", 0) for r in records.values()), default=0)
    return History(run.path, records, tuple(every[n] for n in range(1, begun + 1)))


def spelled(value: Any) -> Any:
    """Return `value` as JSON can hold it: a float that is not finite as a string, in lists and dictionaries too."""
    if isinstance(value, dict):
        return {k: spelled(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
