"""Checkpoints: canonical files, published whole or not at all, proven whole before a byte of them is used.

    checkpoints/00000100/model.safetensors      weights
    checkpoints/00000100/optimizer.safetensors  AdamW's moments, `<weight>.m` and `<weight>.v`, and `step`
    checkpoints/00000100/state.json             step, SHA-256 of the other two, recipe digest, and a checksum of itself

A checkpoint is written in a directory beside its final name, each file synced, `state.json` last, then renamed into
place: a crash at any moment leaves the earlier checkpoints as they were and no half one under a checkpoint's name.
Nothing in it depends on time, host or path, so that two equal runs have equal files.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxdet.errors import Fault, UsageError
from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import FormatError, from_numpy
from mlxdet.training.detours import FRESH, Detour, Past

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Snapshot:
    """The state of a training on the host: weights, first and second moments (float32, the same names), steps done,
    and the past that the next ones depend on. Of adapters also the content digest of the frozen base under them."""

    weights: dict[str, np.ndarray]
    first: dict[str, np.ndarray]
    second: dict[str, np.ndarray]
    step: int
    past: Past = FRESH
    base: str | None = None


class NotFinite(Fault):
    """A state that is not saved, because a value in it is not finite."""


def sync_directory(path: Path) -> None:
    """Make a rename or a new name in `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(handle: int) -> None:
    """Make written bytes survive a power cut. On macOS fsync alone leaves them in the drive's cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


@contextmanager
def saving(what: str, kept: str) -> Iterator[None]:
    """Turn a failure of the file system while saving `what` into a Fault that says what is still good."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise Fault(f"cannot save {what}: {reason}; {kept}") from error


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.sha.update(view)
        self.size += view.nbytes
        self.file.write(view)
        return view.nbytes


def _write(path: Path, fill: Callable[[Any], None]) -> dict[str, Any]:
    with path.open("xb") as file:
        hashed = _Hashed(file)
        fill(hashed)
        file.flush()
        sync_file(file.fileno())
    return {"bytes": hashed.size, "sha256": hashed.sha.hexdigest()}


def _dump(content: dict[str, Any]) -> bytes:
    """The one spelling of a state.json: sorted keys, a checksum over the rest, a final newline."""
    body = json.dumps(content, sort_keys=True)
    check = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**content, "check": check}, sort_keys=True, indent=1) + "\n").encode()


def directory(checkpoints: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps."""
    return checkpoints / f"{step:08d}"


def published(checkpoints: Path) -> list[int]:
    """Return the steps of all checkpoints, ascending: the directories with a number for a name and a state.json."""
    if not checkpoints.is_dir():
        return []
    found = (p for p in checkpoints.iterdir() if re.fullmatch(r"[0-9]{8,}", p.name) and (p / STATE).exists())
    return sorted(int(p.name) for p in found)


def save(checkpoints: Path, state: Snapshot, recipe: str) -> Path:
    """Publish `state` as a checkpoint and return its directory.

    `recipe` is the digest of what the run is made of. Raises Fault if a weight or moment is not finite, or if the
    disk is full: then the earlier checkpoints are untouched.
    """
    final = directory(checkpoints, state.step)
    steps = published(checkpoints)
    kept = f"the last good checkpoint is step {steps[-1]}" if steps else "there is no earlier checkpoint"
    model = {name: from_numpy(w) for name, w in state.weights.items()}
    optimizer = {f"{name}.m": from_numpy(m) for name, m in state.first.items()}
    optimizer |= {f"{name}.v": from_numpy(v) for name, v in state.second.items()}
    for name, tensor in (model | optimizer).items():
        if not np.isfinite(tensor.to_numpy()).all():
            raise NotFinite(f"step {state.step}: tensor {name} is not finite, so it is not saved; {kept}")
    optimizer["step"] = from_numpy(np.array(state.step, np.uint64))
    temporary = checkpoints / f"{_UNFINISHED}{state.step:08d}"
    with saving(str(final), kept):
        checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            files = {
                MODEL: _write(temporary / MODEL, lambda f: write_safetensors(f, model)),
                OPTIMIZER: _write(temporary / OPTIMIZER, lambda f: write_safetensors(f, optimizer)),
            }
            content = {"format": 1, "step": state.step, "recipe": recipe, "files": files}
            if state.past != FRESH:
                # Format 2, so that a version that does not know of withheld updates refuses it.
                detours = [[d.step, d.to] for d in state.past.detours]
                content |= {"format": 2, "skipped": state.past.skipped, "detours": detours}
            content |= {"base": state.base} if state.base is not None else {}
            _write(temporary / STATE, lambda f: f.write(_dump(content)))
            sync_directory(temporary)
            if final.exists():  # a directory of that name without a state.json: not a checkpoint
                shutil.rmtree(final)
            temporary.rename(final)
            sync_directory(checkpoints)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def rotate(checkpoints: Path, keep: int, anchors: Collection[int] = ()) -> list[int]:
    """Remove all but the newest `keep` checkpoints (0: none) and those of `anchors`; return the steps removed."""
    old = [step for step in published(checkpoints)[:-keep] if step not in anchors] if keep > 0 else []
    for step in old:
        _remove(directory(checkpoints, step))
    return old


def discard(checkpoints: Path, after: int) -> list[int]:
    """Remove the checkpoints beyond step `after`, newest first: a crash leaves a chain without a gap in it."""
    beyond = [step for step in reversed(published(checkpoints)) if step > after]
    for step in beyond:
        _remove(directory(checkpoints, step))
    return beyond


def _remove(path: Path) -> None:
    # state.json first: from then on the directory is no checkpoint, whatever happens to the rest.
    (path / STATE).unlink()
    shutil.rmtree(path)


def sweep(checkpoints: Path) -> None:
    """Remove what a crash while saving or rotating left behind. Only while holding the run's lock."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        emptied = re.fullmatch(r"[0-9]{8,}", path.name) and path.is_dir() and not (path / STATE).exists()
        if path.name.startswith(_UNFINISHED) or emptied:
            shutil.rmtree(path)


def load(path: Path, recipe: str | None = None) -> Snapshot:
    """Read the checkpoint in directory `path`, proven whole.

    Raises UsageError, naming the file, if anything is missing, truncated or changed by a single bit, or (where `recipe`
    is given) if it belongs to another run.
    """
    content = _read_state(path)
    way_out = f"remove {path} to go on from the checkpoint before it"
    if recipe is not None and content["recipe"] != recipe:
        raise UsageError(f"{path / STATE}: this checkpoint was written by a run of another recipe; {way_out}")
    trees: dict[str, dict[str, np.ndarray]] = {}
    for name in (MODEL, OPTIMIZER):
        file, said = path / name, content["files"][name]
        try:
            size, sha = file.stat().st_size, _sha256(file)
            if size != said["bytes"] or sha != said["sha256"]:
                what = (
                    f"{size} bytes instead of {said['bytes']}"
                    if size != said["bytes"]
                    else "changed since it was saved"
                )
                raise UsageError(f"{file}: damaged ({what}); {way_out}")
            tensors, _ = read_safetensors(file)
        except OSError as error:
            raise UsageError(f"{file}: cannot be read ({error.strerror}); {way_out}") from None
        except FormatError as error:
            raise UsageError(f"{error}; {way_out}") from None
        trees[name] = {k: t.to_numpy() for k, t in tensors.items()}
    model, optimizer = trees[MODEL], trees[OPTIMIZER]
    step = int(optimizer.pop("step"))
    names = {f"{k}.{moment}" for k in model for moment in "mv"}
    if step != content["step"] or set(optimizer) != names:
        odd = sorted(set(optimizer) ^ names)
        raise UsageError(
            f"{path / OPTIMIZER}: does not belong to {MODEL} (step {step}, {', '.join(odd[:5])}); {way_out}"
        )
    first, second = ({k: optimizer[f"{k}.{moment}"] for k in model} for moment in "mv")
    past = Past(content.get("skipped", 0), tuple(Detour(*d) for d in content.get("detours", ())))
    return Snapshot(model, first, second, step, past, content.get("base"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_state(path: Path) -> dict[str, Any]:
    file = path / STATE
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        content = json.loads(raw)
        del content["check"]
        whole = _dump(content) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{file}: damaged; remove {path} to go on from the checkpoint before it")
    if content["format"] not in (1, 2):
        raise UsageError(f"{file}: checkpoint format {content['format']} is not one this mlxdet reads (1, 2)")
    return content
