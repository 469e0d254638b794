"""PyTorch checkpoints since version 1.6: a zip archive with a pickle and one member for each storage.

    <root>/data.pkl | <root>/data/<key> ... | <root>/version | <root>/byteorder, from 2.1 on

The pickle is read as data (`pickles`), never run. Every storage it names must be there with exactly the bytes it needs,
and every one that is there must be named. Members are stored without compression, so tensors are views of the mapped
file.

Format: caffe2/serialize/inline_container.h and torch/serialization.py of PyTorch.
"""

import numpy as np

from mlxdet.formats import pickles
from mlxdet.formats.archive import Member
from mlxdet.formats.checkpoint import Checkpoint
from mlxdet.formats.source import Source, quote
from mlxdet.formats.torch_objects import Found, as_checkpoint, unknown
from mlxdet.formats.torch_storages import storages

_OTHERS = {"version", "byteorder", ".data/serialization_id", ".data/version", ".format_version", ".storage_alignment"}


def matches(members: dict[str, Member]) -> bool:
    """Return whether an archive has the pickle of a PyTorch checkpoint."""
    return any(name == "data.pkl" or name.endswith("/data.pkl") for name in members)


def read(source: Source, members: dict[str, Member]) -> Checkpoint:
    """Return the tensors of an archive that torch.save wrote. Raises FormatError."""
    found = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(found) != 1:
        raise unknown(source, f"has {len(found)} files named data.pkl")
    root = found[0].removesuffix("data.pkl")
    parts = {name.removeprefix(root): member for name, member in members.items() if name.startswith(root)}
    if "constants.pkl" in parts:
        raise unknown(source, "is a TorchScript archive, which holds a program")
    member = parts["data.pkl"]
    if member.size > pickles.MAX_BYTES:
        raise source.error(f"has a pickle of {member.size} bytes, more than {pickles.MAX_BYTES}")
    checked = any(part.crc for part in parts.values())
    if not checked:
        # PyTorch can be told not to compute checksums; it then writes 0 for every one of them.
        for part in parts.values():
            part.trust()
    order = bytes(parts["byteorder"].data()[:10]) if "byteorder" in parts else b"little"
    if order not in (b"little", b"big"):
        raise source.error("has a byteorder that is neither little nor big")
    text = member.data()
    pickled = pickles.load(source, text.data, 0, "its pickle")
    if pickled.stop != member.size:
        raise source.error(f"has {member.size - pickled.stop} bytes after its pickle")
    known = storages(source, pickled.persistent)
    for storage in known.values():
        stored = parts.get(f"data/{storage.key}")
        if stored is None:
            raise source.error(f"lacks storage {quote(storage.key)} ({storage.nbytes} bytes)")
        if stored.size != storage.nbytes:
            raise source.error(f"storage {quote(storage.key)}: has {stored.size} bytes, not {storage.nbytes}")
    others = sorted(
        members.keys() - {root + name for name in [*_OTHERS, "data.pkl", *(f"data/{key}" for key in known)]}
    )
    for name in others:
        if name.startswith(f"{root}data/"):
            raise source.error(f"member {quote(name)}: is a storage that its pickle never names")
    walk = Found(source)
    walk.walk(pickled.value, "")
    notes = [f"the archive also holds {quote(name)}, which is not part of a checkpoint" for name in others]
    if not checked:
        notes.append("the file was written without checksums, so damage to its numbers would not be seen")

    def data(key: str) -> np.ndarray:
        return parts[f"data/{key}"].data()

    return as_checkpoint(source, "torch", walk, data, order == b"big", notes)
