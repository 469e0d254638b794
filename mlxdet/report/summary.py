"""The result of a run in a few numbers."""

import json
from itertools import pairwise
from typing import Any

from mlxdet.training import checkpoint
from mlxdet.training.run import METRICS, VALIDATION, Run


def summary(run: Run) -> dict[str, Any]:
    """Return path, step, losses, and the SHA-256 of the newest checkpoint's files, as `sha256sum` prints them."""
    steps = run.steps()
    files = {}
    if steps:
        state = checkpoint.directory(run.checkpoints, steps[-1]) / checkpoint.STATE
        files = json.loads(state.read_bytes())["files"]
    step = steps[-1] if steps else 0
    losses = [r["loss"] for r in run.records(METRICS) if r["step"] <= step]  # a log may reach beyond a checkpoint
    validation = sorted((r["step"], r["loss"]) for r in run.records(VALIDATION))
    return {
        "run": str(run.path),
        "stopped": run.stopped,
        "step": step,
        "steps": run.config.optim.steps,
        "parameters": run.manifest["parameters"],
        "loss": losses[-1] if losses else None,
        "validation_first": validation[0] if validation else None,
        "validation_last": validation[-1] if validation else None,
        "model_sha256": files.get(checkpoint.MODEL, {}).get("sha256"),
        "optimizer_sha256": files.get(checkpoint.OPTIMIZER, {}).get("sha256"),
    }


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 60) -> str:
    """Return `values` as one line of bars, averaged down to `width` of them; empty for no values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BARS[int((m - low) / ((high - low) or 1.0) * (len(BARS) - 1) + 0.5)] for m in means)
