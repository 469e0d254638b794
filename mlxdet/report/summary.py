"""The result of a run in a few numbers."""

import json
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
