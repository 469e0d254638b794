"""Log-probabilities under dpo's frozen reference: one float32 per answer, computed once, kept beside the run.

What a kernel gives for a row depends, in the last bits, on the shape of the batch around it and on the row's place
there. So the value of a row is defined as that of the first batch of the run that holds it: a pure function of base,
rows, settings and seed, which a resume finds again whatever it finds first. In the first epoch policy and reference
therefore see the same arrays, and before the first update their difference is exactly 0 (where a compiled forward pass
gives the same bits with and without a backward pass, as on the CPU); later epochs agree to rounding.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxdet.data.packing import RecordBatch, RecordBatches
from mlxdet.errors import UsageError
from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import FormatError, from_numpy
from mlxdet.training.checkpoint import saving, sync_directory, sync_file

FILE = "reference.safetensors"
# (tokens int32 (lines, L + 1), scored bool (lines, L)) -> float32 (lines,): objectives.scored_sums under the reference
Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def compute(batches: RecordBatches, steps: int, score: Score) -> np.ndarray:
    """Return float32 (rows of the corpus, 2), (chosen, rejected), of every row that `steps` steps use; NaN for others.

    Reads the batches of the first epoch, and scores each micro-batch that holds a row for the first time.
    """
    values = np.full((batches.corpus.rows, 2), np.nan, np.float32)
    per_step = batches.batch_size * batches.accumulation
    for step in range(1, min(steps, -(-batches.train_rows // per_step)) + 1):
        batch = batches.batch(step)
        for tokens, scored, rows in zip(batch.tokens, batch.scored, _by_micro(batch), strict=True):
            found = np.isnan(values[rows, 0])
            if found.any():
                pairs = score(tokens, scored).reshape(2, -1).T
                for row, pair in zip(rows[found], pairs[found], strict=True):
                    if np.isnan(values[row, 0]):  # the first place, where a row stands twice in a micro-batch
                        values[row] = pair
    return values


def of_batch(values: np.ndarray, batch: RecordBatch) -> np.ndarray:
    """Return the values of a batch in the order of its lines, float32 (accumulation, lines).

    Raises ValueError if a row of it has none.
    """
    rows = _by_micro(batch)
    if np.isnan(values[rows]).any():
        raise ValueError(f"step {batch.step} holds rows without a reference value")
    return values[rows].swapaxes(1, 2).reshape(len(rows), -1)


def with_reference(batch: RecordBatch, values: np.ndarray) -> RecordBatch:
    """Return `batch` with the reference values of its lines. Raises ValueError if a row of it has none."""
    return replace(batch, reference=of_batch(values, batch))


def _by_micro(batch: RecordBatch) -> np.ndarray:
    """The rows of the pairs of each micro-batch, int64 (accumulation, pairs)."""
    return batch.rows.reshape(len(batch.tokens), -1)


def save(run: Path, values: np.ndarray, identity: str) -> None:
    """Publish `values` in the directory of a run, whole or not at all.

    `identity` stands for all that they follow from: base, corpus, settings (the run's recipe). Raises Fault if the disk
    is full.
    """
    final, temporary = run / FILE, run / (FILE + ".new")
    check = np.frombuffer(_check(values, identity), np.uint8)
    with saving(str(final), "nothing was trained yet"):
        with temporary.open("wb") as file:
            write_safetensors(file, {"values": from_numpy(values), "check": from_numpy(check)})
            file.flush()
            sync_file(file.fileno())
        temporary.rename(final)
        sync_directory(run)


def load(run: Path, identity: str) -> np.ndarray | None:
    """Return the values that `save` published, or None. Raises UsageError if they are not what it wrote."""
    path = run / FILE
    if not path.exists():
        return None
    try:
        tensors, _ = read_safetensors(path)
        values = tensors["values"].to_numpy()
        whole = tensors["check"].to_numpy().tobytes() == _check(values, identity)
    except (FormatError, KeyError, ValueError):
        whole = False
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if not whole:
        raise UsageError(f"{path}: damaged, or of another run; remove it, and it is computed again")
    return values


def _check(values: np.ndarray, identity: str) -> bytes:
    return hashlib.sha256(f"{identity}\n{values.shape}\n".encode() + values.astype("<f4").tobytes()).digest()
