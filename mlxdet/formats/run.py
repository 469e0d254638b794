"""A run of mlxdet, or one checkpoint of it.

    runs/<name>/run.json
    runs/<name>/checkpoints/00000100/{model.safetensors, optimizer.safetensors, state.json}

`state.json` is written last and holds the length and SHA-256 of the other two, and a checksum of itself. A directory
without one is the remains of an interrupted save, not a checkpoint; the newest that has one stands for the run. Lengths
are checked on opening, a file's SHA-256 before the first of its bytes is handed out.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlxdet.formats import safetensors
from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import parse_json
from mlxdet.formats.source import Source
from mlxdet.formats.tensor import DeferredTensor, FormatError, Tensor

STATE, CHECKPOINTS = "state.json", "checkpoints"
# The weights keep their names; what belongs to the optimizer is told apart by a prefix.
FILES = {"model.safetensors": "", "optimizer.safetensors": "optimizer."}


def is_run(path: Path) -> bool:
    """Return whether `path` is the directory of a run."""
    return (path / "run.json").is_file() or _steps(path / CHECKPOINTS) != []


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is the directory of one checkpoint of a run."""
    return (path / STATE).is_file() and any((path / name).is_file() for name in FILES)


def _steps(checkpoints: Path) -> list[Path]:
    """Return the checkpoint directories below `checkpoints` that have a state.json, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if re.fullmatch(r"[0-9]{8,18}", p.name) and (p / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def read_run(path: Path) -> Checkpoint:
    """Return the newest checkpoint of the run in `path`. Raises FormatError if it has none, or a damaged one there."""
    steps = _steps(path / CHECKPOINTS)
    if not steps:
        raise FormatError(f"{path}: this run has no checkpoint yet")
    checkpoint = read_checkpoint(steps[-1])
    note = f"the newest checkpoint of the run, {CHECKPOINTS}/{steps[-1].name}"
    return Checkpoint(checkpoint.path, "mlxdet-run", checkpoint.tensors, checkpoint.metadata, (note,))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in directory `path`. Raises FormatError, naming the file that is missing or damaged."""
    source = Source(path / STATE)
    state = parse_json(source, 0, source.size, "the file")
    if not isinstance(state, dict) or state.get("format") not in (1, 2) or not isinstance(state.get("files"), dict):
        raise source.error("is not the state of a checkpoint of a known format")
    content = {key: value for key, value in state.items() if key != "check"}
    if state.get("check") != hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest():
        raise source.error("does not match its own checksum: damaged")
    tensors: dict[str, Tensor] = {}
    for name, prefix in FILES.items():
        said = state["files"].get(name)
        if not isinstance(said, dict):
            raise source.error(f"does not describe {name}")
        part = Source(path / name)
        if part.size != said.get("bytes"):
            raise part.error(f"has {part.size} bytes, but {STATE} gives it {said.get('bytes')}: damaged")
        proof = _proof(part, said.get("sha256"))
        for tensor_name, tensor in safetensors.parse(part)[0].items():
            tensors[prefix + tensor_name] = _proven(tensor, proof)
    metadata = {key: value for key, value in content.items() if key not in ("format", "files")}
    return Checkpoint(path, "mlxdet-checkpoint", by_name(tensors), metadata)


def _proof(source: Source, sha256: object) -> Callable[[], None]:
    """Return a function that checks the SHA-256 of the file when it is first called."""
    proven = False

    def prove() -> None:
        nonlocal proven
        if not proven and hashlib.sha256(source.view).hexdigest() != sha256:
            raise source.error(f"does not match the SHA-256 in {STATE}: damaged")
        proven = True

    return prove


def _proven(tensor: Tensor, prove: Callable[[], None]) -> Tensor:
    def read() -> np.ndarray:
        prove()
        return tensor.data

    return DeferredTensor(tensor.dtype, tensor.shape, read)
