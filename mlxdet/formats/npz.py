"""npz: a zip archive of npy arrays, as numpy and MLX write them.

Arrays stored without compression stay in the mapped file. A compressed one is unpacked each time it is read, never to
more than its header states.
"""

from mlxdet.formats import npy
from mlxdet.formats.archive import Member
from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import Tensor


def matches(members: dict[str, Member]) -> bool:
    """Return whether all members of an archive are npy arrays."""
    return all(name.endswith(".npy") for name in members)


def read(source: Source, members: dict[str, Member]) -> Checkpoint:
    """Return the arrays of an npz archive under the names numpy gives them. Raises FormatError."""
    tensors: dict[str, Tensor] = {}
    for member in members.values():
        name = member.name.removesuffix(".npy")
        if name in tensors:
            raise source.error(f"has two arrays named {quote(name)}")
        tensors[name] = _tensor(source, name, member)
    return Checkpoint(source.path, "npz", by_name(tensors))


def _tensor(source: Source, name: str, member: Member) -> Tensor:
    header = npy.parse_header(source, name, member.head(npy.MAX_HEADER + 12), member.size)
    return npy.as_tensor(header, lambda: member.data()[header.data :])
