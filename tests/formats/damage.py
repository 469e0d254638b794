"""Ways to damage a file, and what a reader may then do: refuse it, or read what the damaged bytes really say.

`outcome` reads a file to its last byte. Any exception but FormatError escapes it and fails the test.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlxdet.formats import FormatError, open_checkpoint

Content = dict[str, tuple[str, tuple[int, ...], bytes]]


def content(tensors) -> Content:
    """Return every tensor as (dtype, shape, bytes): what two checkpoints must share to be the same."""
    return {name: (tensor.dtype, tensor.shape, tensor.data.tobytes()) for name, tensor in tensors.items()}


def outcome(path: str | os.PathLike[str]) -> Content | None:
    """Return the content of the checkpoint at `path`.

    None if it is refused, at opening or while reading, or if a part of it is reported as unread.
    """
    try:
        checkpoint = open_checkpoint(path)
        read = content(checkpoint.tensors)
        return None if checkpoint.unread else read
    except FormatError as problem:
        # A refusal names its file and stays on one line.
        assert Path(path).name in str(problem) and "\n" not in str(problem)
        return None


def refused_everywhere(path: Path, damaged: Iterable[bytes], reader: Callable[[Path], object] = outcome) -> int:
    """Write each of `damaged` to `path`, require a refusal of each, and return how many there were."""
    number = 0
    for data in damaged:
        path.write_bytes(data)
        assert reader(path) is None, f"damage {number} ({len(data)} bytes) was accepted"
        number += 1
    return number


def refused_when_cut(path: Path, data: bytes, reader: Callable[[Path], object] = outcome) -> None:
    """Require a refusal of every proper prefix of `data`."""
    path.write_bytes(data)
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        assert reader(path) is None, f"the first {length} of {len(data)} bytes were accepted"


def extensions(data: bytes) -> Iterator[bytes]:
    """Yield `data` with something added at its end or start."""
    for extra in (b"\0", b" ", b"x", b"\0" * 32, b"\0" * 256, data[:50]):
        yield data + extra
    for extra in (b"\0", b"x"):
        yield extra + data


def flips(
    path: Path, data: bytes, start: int = 0, stop: int | None = None, every: int = 1
) -> Iterator[tuple[int, Content | None]]:
    """Yield (bit, outcome) for each `every`-th bit of the bytes [start, stop); it is flipped in `path` meanwhile."""
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * start, 8 * (len(data) if stop is None else stop), every):
            byte = data[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            yield bit, outcome(path)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
