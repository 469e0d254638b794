"""The files a corpus is made of: which ones, in which order, and how their bytes are read.

A path is a file or a directory. A directory stands for all regular files below it, sorted by the bytes of their
relative path; names that start with a dot are skipped, and links to directories are not followed. Several paths keep
the order in which they were given. Nothing here depends on the order in which a file system lists its entries, or on
the locale.

A text file is read in units: a physical line with its newline, cut after at most 64 KiB (at a character boundary)
where a line is longer. A unit is what a tokenizer encodes at a time, so ids are a function of the text alone, and
memory is bounded.
"""

import contextlib
import io
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mlxdet.errors import UsageError

CHUNK = 1 << 22  # bytes of a streaming read
UNIT = 1 << 16  # bytes of text encoded at a time, at most
BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn an OSError inside into a UsageError that names `name`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Source:
    """One file, or one text held in memory (`data`), of a corpus."""

    name: str
    size: int  # bytes
    data: bytes | None = None

    def open(self) -> BinaryIO:
        """Return a binary file object at the start. Raises UsageError if it cannot be opened."""
        if self.data is not None:
            return io.BytesIO(self.data)
        with readable(self.name):
            return open(self.name, "rb")

    def chunks(self) -> Iterator[bytes]:
        """Yield the content in order. Raises UsageError if it cannot be read or is no longer `size` bytes long."""
        seen = 0
        with self.open() as file:
            while True:
                with readable(self.name):
                    chunk = file.read(CHUNK)
                if not chunk:
                    break
                seen += len(chunk)
                yield chunk
        if seen != self.size:
            raise changed(self.name)


def changed(name: str) -> UsageError:
    """The error for a file whose content is not what it was a moment ago."""
    return UsageError(f"{name}: the file changed while it was being read; start again when it is at rest")


def find_sources(paths: Sequence[str]) -> list[Source]:
    """Return the files that `paths` stand for, in order.

    Raises UsageError, naming the path, if one is missing, unreadable, no regular file, an empty file, or a directory
    without any text in it. An empty file inside a directory is kept and adds nothing.
    """
    found: list[Source] = []
    for path in map(os.fspath, paths):
        if os.path.isdir(path):
            below = [_source(os.path.join(path, name)) for name in _names(path)]
            if not any(source.size for source in below):
                raise UsageError(f"{path}: the directory has no text in it (names that start with a dot do not count)")
            found += below
        else:
            source = _source(path)
            if not source.size:
                raise UsageError(f"{path}: the file is empty")
            found.append(source)
    return found


def _names(top: str) -> list[str]:
    """Relative paths of the files below `top`, sorted by their bytes."""

    def fail(error: OSError) -> None:
        raise error

    names: list[str] = []
    with readable(top):
        for folder, folders, files in os.walk(top, onerror=fail):
            folders[:] = [name for name in folders if not name.startswith(".")]
            names += [os.path.relpath(os.path.join(folder, name), top) for name in files if not name.startswith(".")]
    return sorted(names, key=os.fsencode)


def _source(path: str) -> Source:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file or directory") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"{path!r}: cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: not a regular file")
    with readable(path):
        open(path, "rb").close()
    return Source(path, status.st_size)


@dataclass(frozen=True)
class Unit:
    """A piece of text that is encoded on its own: its first byte in the file, its line (from 1), and the text."""

    offset: int
    line: int
    raw: bytes
    text: str


def units(source: Source, offset: int = 0, line: int = 1) -> Iterator[Unit]:
    """Yield the units of a UTF-8 text in order, from a unit that starts at `offset` on `line`.

    A byte order mark at the start of the file is dropped: it is a signature, not text (offsets still count it). Raises
    UsageError naming file, line and byte offset where the text is not UTF-8, and for UTF-16 and UTF-32.
    """
    with source.open() as file:
        with readable(source.name):
            if offset == 0:
                head = file.read(4096)
                _refuse_utf16(source.name, head)
                offset = len(BOM) if head.startswith(BOM) else 0
            file.seek(offset)
        carry = b""
        while True:
            with readable(source.name):
                raw = carry + file.readline(UNIT - len(carry))
            if not raw:
                return
            cut = _boundary(raw) if len(raw) == UNIT and not raw.endswith(b"\n") else len(raw)
            raw, carry = raw[:cut], raw[cut:]
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{source.name}: line {line}, byte offset {offset + error.start}: not UTF-8 "
                    f"(0x{raw[error.start]:02x}: {error.reason}); convert the file to UTF-8, or train on bytes, "
                    f"without --tokenizer"
                ) from None
            yield Unit(offset, line, raw, text)
            offset += len(raw)
            line += raw.endswith(b"\n")


def byte_order_mark(source: Source) -> bytes:
    """Return the UTF-8 byte order mark that the file starts with, or nothing."""
    with source.open() as file, readable(source.name):
        return BOM if file.read(len(BOM)) == BOM else b""


def _boundary(raw: bytes) -> int:
    """Where to cut `raw` so that no character is split: before a character that is not complete at the end."""
    for back in (1, 2, 3):
        byte = raw[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) - back if back < length else len(raw)
        if byte < 0x80:
            break
    return len(raw)


def _refuse_utf16(name: str, head: bytes) -> None:
    """Raise UsageError if the first bytes are those of UTF-16 or UTF-32, with or without a byte order mark.

    Without a mark: every other byte of mostly Latin text is zero. Such a file is valid UTF-8, full of NULs.
    """
    even, odd = head[0::2].count(0), head[1::2].count(0)
    half = len(head) // 2
    lopsided = half >= 8 and max(even, odd) > 0.8 * half and min(even, odd) < 0.2 * half
    if head.startswith((b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")) or lopsided:
        raise UsageError(
            f"{name}: the text is UTF-16 or UTF-32, not UTF-8; convert it first (iconv -f UTF-16 -t UTF-8), or train "
            f"on bytes, without --tokenizer"
        )
