"""CBOR, the part of it that serde writes: definite lengths, text keys, no tags.

Format: RFC 8949.
"""

import struct

from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import FormatError

MAX_DEPTH = 128
MAX_ITEMS = 5_000_000  # about 12 for a tensor
_FLOATS = {25: ">e", 26: ">f", 27: ">d"}
_SIMPLE = {20: False, 21: True, 22: None}


def parse(source: Source, start: int, stop: int) -> object:
    """Return the one item that fills the bytes [start, stop) exactly. Raises FormatError, for a key set twice too."""
    reader = _Reader(source, start, stop)
    value = reader.item(0)
    if reader.position != stop:
        raise source.error(
            f"has {stop - start} bytes of CBOR metadata, of which {stop - reader.position} are left over"
        )
    return value


class _Reader:
    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.position, self.stop, self.items = source, start, stop, 0

    def error(self, message: str) -> FormatError:
        return self.source.error(f"has CBOR metadata that {message} (at byte {self.position})")

    def take(self, length: int) -> bytes:
        start, stop = self.position, self.position + length
        if stop > self.stop:
            raise self.error("is truncated")
        self.position = stop
        return bytes(self.source.view[start:stop])

    def item(self, depth: int) -> object:
        self.items += 1
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            raise self.error("is nested too deeply" if depth > MAX_DEPTH else f"holds more than {MAX_ITEMS} items")
        initial = self.take(1)[0]
        major, info = initial >> 5, initial & 31
        if major == 7:
            if info in _FLOATS:
                return struct.unpack(_FLOATS[info], self.take(1 << (info - 24)))[0]
            if info not in _SIMPLE:
                raise self.error(f"has the simple value {info}, which is not supported")
            return _SIMPLE[info]
        if info > 27:
            raise self.error("has an item of indefinite length")
        number = info if info < 24 else int.from_bytes(self.take(1 << (info - 24)), "big")
        if major == 0:
            return number
        if major == 1:
            return -1 - number
        if major == 2:
            return self.take(number)
        if major == 3:
            try:
                return self.take(number).decode()
            except UnicodeDecodeError:
                raise self.error("has a text that is not UTF-8") from None
        if major == 4:
            return [self.item(depth + 1) for _ in range(number)]
        if major == 5:
            return self.table(number, depth + 1)
        raise self.error("has a tag")

    def table(self, number: int, depth: int) -> dict[str, object]:
        table: dict[str, object] = {}
        for _ in range(number):
            key = self.item(depth)
            if not isinstance(key, str):
                raise self.error("has a key that is no text")
            if key in table:
                raise self.error(f"has the key {quote(key)} twice")
            table[key] = self.item(depth)
        return table
