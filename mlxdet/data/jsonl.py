"""Rows of a JSON Lines file: an index of offsets over bytes that stay where they are, and one row parsed at a time.

A line ends at a newline byte and nowhere else: U+2028, U+0085 or a form feed inside a string do not split it. A
carriage return before the newline, spaces and tabs around a row and a UTF-8 byte order mark at the start of the file
are dropped; a line of white space is skipped, and counts in the numbers of lines. Each row is one object in strict
JSON: no NaN or Infinity, and no name twice in an object (a parser would keep the last one and say nothing).

Up to 64 MB of bytes are held in RAM, so that editing the file does not disturb a run. Of a larger file only the index
is (24 bytes a row); its rows are read on demand, and a file that has changed since it was indexed is refused.
"""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from mlxdet.data.sources import BOM, Source, changed, readable
from mlxdet.data.text import IN_MEMORY
from mlxdet.errors import UsageError

BLANK = b" \t\r\n"
SHOWN = 20  # problems written out
JSON_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number",
              float: "a number", type(None): "null"}  # fmt: skip


class RowError(Exception):
    """What is wrong with one row: the message names the field. Whoever reads the file adds the file and the line."""


class BadRows(UsageError):
    """Some rows of a file cannot be used. `problems`: the first 20, as `file:line: what`; `count`: how many rows."""

    def __init__(self, problems: Sequence[str], count: int):
        more = [f"and {count - len(problems)} more"] if count > len(problems) else []
        super().__init__("\n".join([*problems, *more]))
        self.problems, self.count = list(problems), count


class JsonLines:
    """The rows of one file by index, from 0. Read it through `scan` once; then `raw` and `place` answer by index."""

    unit = ""  # what stands before the number of a line where a place is written

    def __init__(self, source: Source):
        self.name, self.bytes, self.sha256 = source.name, source.size, ""
        self._source = source
        self._starts, self._stops, self._lines = array("Q"), array("Q"), array("Q")  # 8 bytes each
        self._held: bytearray | None = bytearray() if source.size <= IN_MEMORY else None
        self._file = -1  # the descriptor that rows are read from
        self._stamp = (0, 0)

    def __len__(self) -> int:
        """Return how many rows were indexed."""
        return len(self._starts)

    def scan(self) -> Iterator[bytes]:
        """Yield the bytes of every row in order, and index them.

        Raises UsageError if the file cannot be read, changes meanwhile, or is UTF-16 or UTF-32.
        """
        seen, line, check = 0, 0, hashlib.sha256()
        with self._source.open() as file:
            if self._held is None:
                self._keep(file.fileno())
            while True:
                with readable(self.name):
                    raw = file.readline()
                if not raw:
                    break
                start, line = seen, line + 1
                seen += len(raw)
                check.update(raw)
                if self._held is not None:
                    self._held += raw
                if start == 0:
                    _refuse_utf16(self.name, raw)
                    start = len(BOM) if raw.startswith(BOM) else 0
                    raw = raw[start:]
                body = raw.lstrip(BLANK)
                start += len(raw) - len(body)
                body = body.rstrip(BLANK)
                if body:
                    self._add(start, len(body), line)
                    yield body
        if seen != self.bytes:
            raise changed(self.name)
        self.sha256 = check.hexdigest()

    def _keep(self, file: int) -> None:
        """Read rows from this descriptor later on: of this very file, whatever takes its name."""
        self._file = os.dup(file)
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._stamp = (status.st_size, status.st_mtime_ns)

    def _add(self, start: int, length: int, line: int) -> None:
        self._starts.append(start)
        self._stops.append(start + length)
        self._lines.append(line)

    def raw(self, row: int) -> bytes:
        """Return the bytes of a row. Raises UsageError if the file is no longer the one that was indexed."""
        start, stop = self._starts[row], self._stops[row]
        if self._held is not None:
            return bytes(self._held[start:stop])
        with readable(self.name):
            status = os.fstat(self._file)
            raw = os.pread(self._file, stop - start, start)
        if (status.st_size, status.st_mtime_ns) != self._stamp or len(raw) != stop - start:
            raise UsageError(
                f"{self.name}: the file changed after it was read (its size or time stamp differs), so its rows are "
                f"no longer those of this run; put it back, or start again"
            )
        return raw

    def place(self, row: int) -> str:
        """Return `file:line` of a row."""
        return f"{self.name}:{self.unit}{self._lines[row]}"

    def line(self, row: int) -> int:
        """Return the line of a row, from 1."""
        return self._lines[row]

    def offset(self, row: int) -> int:
        """Return the first byte of a row in the file."""
        return self._starts[row]


def parse(raw: bytes, offset: int = 0) -> dict[str, Any]:
    """Return the object in the bytes of a row, which start at byte `offset` of the file. Raises RowError."""
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {offset + error.start} of the file "
            f"({error.reason}); convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg[:1].lower()}{error.msg[1:]} (character {error.pos + 1})") from None
    except RecursionError:
        raise RowError("not usable: nested too deeply") from None
    except ValueError:  # Python reads no integer of more than 4300 digits
        raise RowError("not usable: a number with too many digits") from None
    if not isinstance(value, dict):
        raise RowError(f"a row must be an object with named fields, not {JSON_KINDS[type(value)]}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise RowError(f"field {short(next(n for n in names if names.count(n) > 1))} appears twice in one object")
    return table


def _constant(name: str) -> None:
    raise RowError(f"not JSON: {name} is no JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)


def short(text: str) -> str:
    """Return `text` quoted for a message: control characters escaped, cut after 60 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _refuse_utf16(name: str, head: bytes) -> None:
    """Raise UsageError for UTF-16 and UTF-32: a JSON text starts with two ASCII characters, so a NUL shows them."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in head[:4]:
        raise UsageError(f"{name}: the file is UTF-16 or UTF-32, not UTF-8; convert it (iconv -f UTF-16 -t UTF-8)")
