"""A run's adapters merged into its base, as one file."""

import hashlib
from pathlib import Path
from typing import Any

from mlxdet import backends
from mlxdet.errors import UsageError
from mlxdet.formats.safetensors import write_safetensors
from mlxdet.formats.tensor import from_numpy
from mlxdet.training import base
from mlxdet.training.checkpoint import saving, sync_directory, sync_file
from mlxdet.training.run import Run


def merge(path: str | Path, out: str | Path, step: int | None = None, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the merged weights of the LoRA run at `path` to the file `out`, whole or not at all.

    Returns {"run", "step", "file", "tensors", "sha256" of the file, "digest" of its content}. Raises UsageError if the
    run has no adapters or no such checkpoint, or if there is something at `out` already; Fault if the disk is full.
    """
    run, final = Run(path), Path(out)
    if not run.config.tune.lora_rank:
        raise UsageError(
            f"{run.path}: nothing to merge, as this run trained all weights: its checkpoints are whole models"
        )
    if final.exists() and not (overwrite and final.is_file()):
        raise UsageError(f"{final}: already there; choose another --out{', or --overwrite' if final.is_file() else ''}")
    if not final.parent.is_dir():
        raise UsageError(f"{final.parent}: no such directory")
    backends.activate("cpu")  # nothing is computed on a device; the adapters' module imports MLX
    weights, origin = base.read(run.path, step)
    temporary = final.with_name(final.name + ".new")
    with saving(str(final), "nothing was changed"):
        with temporary.open("wb") as file:
            write_safetensors(file, {name: from_numpy(w) for name, w in weights.items()})
            file.flush()
            sync_file(file.fileno())
        sha = hashlib.sha256(temporary.read_bytes()).hexdigest()
        temporary.rename(final)
        sync_directory(final.parent)
    return {"run": str(run.path), "step": origin["step"], "file": str(final), "tensors": len(weights), "sha256": sha,
            "digest": origin["digest"]}  # fmt: skip
