"""A file opened for reading: mapped into memory, with errors that name it.

Opening costs no reading: pages come in when they are touched. Every reader takes its bytes from here.
"""

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from mlxdet.formats.tensor import FormatError


def quote(name: object) -> str:
    """Return `name` for a message: quoted, on one line, at most about 100 characters."""
    text = repr(name if isinstance(name, str | int | bool | None) and not _huge(name) else str(type(name).__name__))
    return text if len(text) <= 100 else f"{text[:80]}...{text[-12:]}"


def bare(name: object) -> str:
    """Return `name` as `quote` does, without the quotation marks."""
    return quote(name if isinstance(name, str) else str(name))[1:-1]


def escape(text: str) -> str:
    """Return `text` on one line, with everything escaped that a terminal would obey instead of showing."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _huge(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > 256  # Python refuses to print integers of many digits


class Source:
    """The bytes of one regular file.

    `view` (memoryview) and `array` (uint8, 1-D) are two faces of the same read-only mapping. Raises FormatError if the
    path is no readable regular file, or empty.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            # Looked at before it is opened: opening a pipe would wait for its writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self.error("is not a regular file")
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise self.error("is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:
            raise self.error(f"cannot be opened: {problem.strerror or problem}") from None
        except ValueError as problem:  # a path with a NUL character, among others
            raise problem if isinstance(problem, FormatError) else self.error(f"cannot be opened: {problem}") from None
        self.view = memoryview(self._map)
        self.array = np.frombuffer(self._map, np.uint8)

    def error(self, message: str, tensor: object = None) -> FormatError:
        """Return (not raise) a FormatError that names this file and, if given, the tensor."""
        where = "" if tensor is None else f"tensor {quote(tensor)}: "
        return FormatError(f"{self.path}: {where}{message}")

    def find(self, what: bytes, start: int, stop: int) -> int:
        """Return the first position of `what` in [start, stop), or -1."""
        return self._map.find(what, start, stop)

    def is_zero(self, start: int, stop: int) -> bool:
        """Return whether every byte in [start, stop) is zero."""
        return not self.array[start:stop].any()
