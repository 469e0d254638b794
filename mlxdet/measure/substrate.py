"""One step of a run on another device, with other kernels or in another dtype, from the same state and batch.

MLX reads some settings once, so unless both are the CPU (where nothing is pinned) another device or other kernels get a
process of their own: `python -m mlxdet.measure.substrate`, which reads its task from standard input.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxdet import backends
from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch
from mlxdet.data.packing import RecordBatch
from mlxdet.errors import Fault, UsageError
from mlxdet.training import checkpoint
from mlxdet.training.detours import Detour, Past
from mlxdet.training.run import Run

if TYPE_CHECKING:
    from mlxdet.training.corpora import AnyBatch, AnyCorpus
    from mlxdet.training.step import State

ARRAYS = ("tokens", "scored", "positions", "segments", "reference")  # of a batch, as far as it has them


@dataclass(frozen=True)
class Substrate:
    """What a step is computed by."""

    device: str
    kernels: str
    dtype: str

    @staticmethod
    def of(config: TrainConfig) -> "Substrate":
        return Substrate(config.loop.device, config.loop.kernels, config.model.dtype)

    def __str__(self) -> str:
        return f"{self.device}, {self.kernels} kernels, {self.dtype}"

    def row(self, found: dict[str, Any], note: str = "") -> dict[str, Any]:
        """Return a row of the table of substrates."""
        return {**asdict(self), "loss": found["loss"], "grad_norm": found["grad_norm"], "note": note}


def on_substrate(
    where: Substrate, run: Run, own: Backend, state: "State", batch: "AnyBatch", corpus: "AnyCorpus"
) -> dict[str, Any]:
    """Return the row of the step that `batch` trains from `state`, computed on `where`.

    Raises UsageError if the device is not here, Fault if its process fails.
    """
    here = Substrate.of(run.config)
    if (where.device, where.kernels) == (here.device, here.kernels):
        backend = own
    elif (where.device, here.device) == ("cpu", "cpu"):
        backend = Backend("cpu", where.kernels, own.pins, own.blas)
    else:
        backends.select(where.device)
        return where.row(_in_own_process(where, run, state, batch, corpus.vocab_size), "in a process of its own")
    return where.row(_measure(where, run.config, backend, state, batch, corpus.vocab_size))


def _measure(
    where: Substrate, config: TrainConfig, backend: Backend, state: "State", batch: "AnyBatch", vocab: int
) -> dict[str, float]:
    from mlxdet.training.step import TrainStep

    changed = config.replace(dtype=where.dtype, kernels=where.kernels, device=where.device)
    _, outcome = TrainStep(changed, vocab, backend)(state, batch)
    loss: Any = outcome.loss.item()
    norm: Any = outcome.grad_norm.item()
    return {"loss": loss, "grad_norm": norm}


def _in_own_process(where: Substrate, run: Run, state: "State", batch: "AnyBatch", vocab: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="mlxdet-") as directory:
        # Not as a checkpoint: one with weights that are not finite is never published.
        arrays = {f"{kind}/{k}": v for kind, tree in _trees(state).items() for k, v in tree.items()}
        np.savez(Path(directory) / "state.npz", **arrays)  # type: ignore[arg-type]
        held = {name: whole for name in ARRAYS if (whole := getattr(batch, name, None)) is not None}
        np.savez(Path(directory) / "batch.npz", **held)
        task = {**asdict(where), "run": str(run.path), "directory": directory, "vocab": vocab, "step": state.step,
                "skipped": state.past.skipped, "detours": [[d.step, d.to] for d in state.past.detours]}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "mlxdet.measure.substrate"], input=json.dumps(task), capture_output=True, text=True
        )
    if done.returncode == 2:
        raise UsageError(done.stderr.strip())
    if done.returncode:
        raise Fault(f"the step on {where} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return {k: float(v) for k, v in json.loads(done.stdout).items()}


def _trees(state: "State") -> dict[str, dict[str, np.ndarray]]:
    saved: checkpoint.Snapshot = state.snapshot()
    base = {k: np.array(w) for k, w in state.base.items()}
    return {"weights": saved.weights, "first": saved.first, "second": saved.second, "base": base}


def _main() -> int:
    task = json.load(sys.stdin)
    where = Substrate(task["device"], task["kernels"], task["dtype"])
    try:
        backend = backends.activate(where.device, where.kernels)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    import mlx.core as mx

    from mlxdet.training.step import State

    trees: dict[str, dict[str, np.ndarray]] = {"weights": {}, "first": {}, "second": {}, "base": {}}
    with np.load(Path(task["directory"]) / "state.npz") as arrays:
        for name in arrays:
            kind, weight = name.split("/", 1)
            trees[kind][weight] = arrays[name]
    past = Past(task["skipped"], tuple(Detour(*d) for d in task["detours"]))
    base = {k: mx.array(w) for k, w in trees.pop("base").items()}
    saved = checkpoint.Snapshot(trees["weights"], trees["first"], trees["second"], task["step"], past)
    state, none = State.of(saved, base), np.zeros(0, np.int64)
    with np.load(Path(task["directory"]) / "batch.npz") as arrays:
        held: dict[str, Any] = {name: arrays.get(name) for name in ARRAYS}
    batch: Any = Batch(task["step"] + 1, held["tokens"], none, "")
    if held["scored"] is not None:
        batch = RecordBatch(step=task["step"] + 1, rows=none, spans=none, digest="", **held)
    found = _measure(where, Run(task["run"]).config, backend, state, batch, task["vocab"])
    print(json.dumps({k: str(v) for k, v in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
