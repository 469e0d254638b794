"""A directory: a run of mlxdet, a checkpoint of one, a sharded checkpoint with its index, or checkpoint files.

Configurations, tokenizers and whatever else lies beside a model are passed over. If there is no index and more than one
file is a checkpoint, the tensors of each are called `file:tensor`.
"""

from pathlib import Path

from mlxdet.formats import run, sharded
from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.detect import identify, open_file
from mlxdet.formats.source import Source
from mlxdet.formats.tensor import FormatError, Tensor


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in directory `path`. Raises FormatError, naming the file or the directory."""
    if run.is_checkpoint(path):
        return run.read_checkpoint(path)
    if run.is_run(path):
        return run.read_run(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    sources = [Source(file) for file in files if file.stat().st_size]
    indices = [source for source in sources if source.path.name.endswith(".index.json") and sharded.looks_like(source)]
    if indices:
        # safetensors before PyTorch where a model is there as both.
        chosen = max(
            indices, key=lambda source: (source.path.name.endswith(".safetensors.index.json"), -indices.index(source))
        )
        checkpoint = sharded.read(chosen, open_file)
        rest = [f"{source.path.name} is another index, and was not read" for source in indices if source is not chosen]
        held = {shard for source in indices for shard in sharded.shards(source)}
        beside = [s.path.name for s in sources if s not in indices and s.path.name not in held and identify(s)]
        rest += [f"{name} is not in the index, and was not read" for name in beside]
        notes = (*checkpoint.notes, *rest)
        return Checkpoint(
            path, "sharded", checkpoint.tensors, checkpoint.metadata, notes, checkpoint.unread, checkpoint.tied
        )
    parts = {source.path.name: open_file(source) for source in sources if identify(source)}
    if not parts:
        raise FormatError(f"{path}: holds no checkpoint file of a known format")
    if len(parts) == 1:
        ((name, only),) = parts.items()
        return Checkpoint(
            path, only.format, only.tensors, only.metadata, (f"read from {name}", *only.notes), only.unread, only.tied
        )
    return _together(path, parts)


def _together(path: Path, parts: dict[str, Checkpoint]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, object] = {}
    notes: list[str] = []
    unread: list[str] = []
    tied: list[tuple[str, ...]] = []
    for file, part in parts.items():
        tensors.update({f"{file}:{name}": tensor for name, tensor in part.tensors.items()})
        metadata[file] = dict(part.metadata)
        notes += [f"{file}: {note}" for note in part.notes]
        unread += [f"{file}:{name}" for name in part.unread]
        tied += [tuple(f"{file}:{name}" for name in group) for group in part.tied]
    return Checkpoint(path, "directory", by_name(tensors), metadata, tuple(notes), tuple(unread), tuple(tied))
