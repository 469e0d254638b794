"""Checkpoint files of any framework as tensors of raw bytes. Depends on numpy and the standard library alone.

`open_checkpoint` takes a file, an index of shards, a directory or a run of mlxdet, and finds out by content what it is:
safetensors, npz, npy, GGUF, PyTorch (zip and legacy), burnpack, .tinygpt. Files are mapped into memory, so that opening
costs the header. Every reader proves its file whole (exact length, nothing overlapping, no gap it cannot explain, no
name twice) or raises FormatError, which names the file and the tensor. Nothing that a file names is ever imported or
run.
"""

import os
from pathlib import Path

from mlxdet.formats.checkpoint import Checkpoint
from mlxdet.formats.digest import content_digest
from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import FormatError, Tensor, from_numpy

__all__ = [
    "Checkpoint",
    "FormatError",
    "Tensor",
    "content_digest",
    "from_numpy",
    "open_checkpoint",
    "read_safetensors",
    "write_safetensors",
]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at `path`, proven whole, its tensors in name order and still in the file.

    Raises FormatError, in one line that names the file and if possible the tensor, for anything that is not a whole
    checkpoint of a known format.
    """
    from mlxdet.formats import detect, directory, sharded
    from mlxdet.formats.source import Source

    if os.path.isdir(path):
        try:
            return directory.read(Path(path))
        except OSError as problem:
            raise FormatError(f"{path}: cannot be read: {problem.strerror}") from None
    source = Source(path)
    return sharded.read(source, detect.open_file) if sharded.looks_like(source) else detect.open_file(source)
