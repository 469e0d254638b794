"""PyTorch checkpoints before version 1.6 (and with `_use_new_zipfile_serialization=False`): pickles, then storages.

    pickle: magic number | pickle: 1001 | pickle: system | pickle: the object | pickle: list of keys
    for each key in that order: number of elements i64 | elements

All of it is little-endian, whatever machine wrote it: the field `little_endian` of the system pickle says what the
machine was, and PyTorch does not read it. The pickles are read as data (`pickles`), never run.

Format: _legacy_save in torch/serialization.py and writeFileRaw in torch/csrc/serialization.cpp of PyTorch.
"""

from functools import partial

import numpy as np

from mlxdet.formats import pickles
from mlxdet.formats.checkpoint import Checkpoint
from mlxdet.formats.source import Source, quote
from mlxdet.formats.torch_objects import Found, as_checkpoint
from mlxdet.formats.torch_storages import storages

_MAGIC = 0x1950A86A20F9469CFC6C
_START = b"\x8a\n" + _MAGIC.to_bytes(10, "little") + b"."
_PROTOCOL = 1001


def looks_like(source: Source) -> bool:
    """Return whether the file starts with the pickle of PyTorch's magic number, of any protocol from 2 on."""
    head = bytes(source.view[:24])
    return head[:1] == b"\x80" and _START in head


def read(source: Source) -> Checkpoint:
    """Return the tensors of a file that torch.save wrote before version 1.6. Raises FormatError."""
    position, values = 0, []
    for what in ("magic number", "protocol number", "system pickle", "pickle", "list of storages"):
        pickled = pickles.load(source, source.view, position, f"its {what}")
        position = pickled.stop
        values.append(pickled)
    magic, protocol, _, pickled, listed = values
    if (magic.value, protocol.value) != (_MAGIC, _PROTOCOL):
        raise source.error("is not a PyTorch checkpoint of a known version")
    known = storages(source, pickled.persistent)
    keys = listed.value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(known):
        raise source.error("lists other storages than its pickle names")
    data: dict[str, np.ndarray] = {}
    for key in keys:
        storage, start = known[key], position + 8
        if start > source.size or int.from_bytes(source.view[position:start], "little", signed=True) != storage.size:
            raise source.error(f"storage {quote(key)}: does not state the {storage.size} elements its pickle gives it")
        position = start + storage.nbytes
        if position > source.size:
            raise source.error(f"storage {quote(key)}: ends at byte {position}, beyond the file: truncated")
        data[key] = source.array[start:position]
    if position != source.size:
        raise source.error(f"has {source.size - position} bytes after its last storage")
    found = Found(source)
    found.walk(pickled.value, "")
    return as_checkpoint(source, "torch-legacy", found, partial(dict.__getitem__, data), False, [])
