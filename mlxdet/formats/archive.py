"""Zip archives read strictly and in place: the container of npz files and of PyTorch checkpoints.

Python's zipfile forgives: bytes before, between and after the members, members that overlap, two members of one name.
Here the members, in the order of the file, must follow each other without a gap from byte 0 to the central directory,
which must be followed by its end record and nothing else. Members stored without compression are views of the mapped
file. A member's CRC-32 is checked before its first byte is handed out.

Format: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3 (zip64).
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np

from mlxdet.formats.checks import MAX_EXPANDED
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import FormatError

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_DESCRIPTOR, _UTF8 = 1 << 3, 1 << 11
_KNOWN_FLAGS = 1 << 1 | 1 << 2 | _DESCRIPTOR | _UTF8
STORED, DEFLATED = 0, 8


def looks_like(source: Source) -> bool:
    """Return whether the file starts as a zip archive with members, or is one without any."""
    return source.view[:4] in (b"PK\x03\x04", b"PK\x05\x06")


class _Directory(NamedTuple):
    entries: int
    start: int
    stop: int


class _Entry(NamedTuple):
    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    offset: int


class Member:
    """One file of an archive. `size` is its length in bytes once unpacked."""

    def __init__(self, source: Source, entry: _Entry, start: int):
        self.name, self.size, self.crc = entry.name, entry.size, entry.crc
        self.stored = entry.method == STORED
        self._source, self._start, self._stop = source, start, start + entry.packed
        self._proven = False

    def error(self, message: str) -> FormatError:
        """Return a FormatError that names the archive and this member."""
        return self._source.error(f"member {quote(self.name)}: {message}")

    def head(self, length: int) -> bytes:
        """Return the first `length` bytes at most, without the proof of their checksum."""
        if self.stored:
            return bytes(self._source.view[self._start : min(self._stop, self._start + length)])
        try:
            return zlib.decompressobj(-15).decompress(self._source.view[self._start : self._stop], length)
        except zlib.error as problem:
            raise self.error(f"cannot be unpacked: {problem}") from None

    def data(self) -> np.ndarray:
        """Return all bytes, uint8: a view of the file if they are stored. Raises FormatError on a wrong checksum."""
        unpacked = self._source.array[self._start : self._stop] if self.stored else self._inflate()
        # The bytes of a stored member cannot change between two readings; those of a packed one are made anew.
        if not (self._proven and self.stored):
            if zlib.crc32(unpacked.data) != self.crc:
                raise self.error("its bytes do not match its CRC-32: damaged")
            self._proven = True
        return unpacked

    def trust(self) -> None:
        """Do without the checksum of this member: its writer did not compute one."""
        self._proven = True

    def _inflate(self) -> np.ndarray:
        """Return the unpacked bytes. Never makes more than the size that the directory states."""
        if self.size > MAX_EXPANDED:
            raise self.error(f"unpacks to {self.size} bytes, more than {MAX_EXPANDED}; save it without compression")
        stream = zlib.decompressobj(-15)
        try:
            # One byte above the stated size is asked for, so that a stream that goes on is seen.
            unpacked = stream.decompress(self._source.view[self._start : self._stop], self.size + 1)
        except zlib.error as problem:
            raise self.error(f"cannot be unpacked: {problem}") from None
        if len(unpacked) != self.size or not stream.eof or stream.unused_data or stream.unconsumed_tail:
            raise self.error(f"does not unpack to exactly the {self.size} bytes it states")
        return np.frombuffer(unpacked, np.uint8)


def read_archive(source: Source) -> dict[str, Member]:
    """Return the members of the archive by name, in the order of the directory; empty folders are left out.

    Raises FormatError unless every byte of the file belongs to exactly one member or to the directory.
    """
    directory = _find_directory(source)
    entries = _read_directory(source, directory)
    members: dict[str, Member] = {}
    position = 0
    placed: dict[str, Member] = {}
    ordered = sorted(entries, key=lambda entry: entry.offset)
    starts = [*(entry.offset for entry in ordered), directory.start]
    for entry, following in zip(ordered, starts[1:], strict=True):
        if entry.offset != position:
            kind = "overlaps the one before it" if entry.offset < position else "leaves a gap before it"
            raise source.error(f"member {quote(entry.name)}: {kind} (starts at {entry.offset}, not at {position})")
        start = _check_local(source, entry, directory.start)
        position = _check_descriptor(source, entry, start + entry.packed, following)
        placed[entry.name] = Member(source, entry, start)
    if position != directory.start:
        raise source.error(f"has {directory.start - position} bytes before its zip directory that belong to no member")
    for entry in entries:
        if entry.name in members:
            raise source.error(f"has two members named {quote(entry.name)}")
        members[entry.name] = placed[entry.name]
    return {name: member for name, member in members.items() if not (name.endswith("/") and member.size == 0)}


def _find_directory(source: Source) -> _Directory:
    """Return where the central directory is, from the end record that must close the file."""
    end = source.size - _END.size
    if end < 0 or source.view[end : end + 4] != b"PK\x05\x06":
        raise source.error("does not end with a zip directory: truncated, or something was added")
    _, disk, first_disk, here, entries, size, start, comment = _END.unpack(source.view[end:])
    stop = end
    if comment:
        raise source.error("states a zip comment beyond its end: truncated")
    locator = end - _LOCATOR.size
    if locator >= 0 and source.view[locator : locator + 4] == b"PK\x06\x07":
        _, disk64, position, disks = _LOCATOR.unpack(source.view[locator:end])
        if position + _END64.size != locator or source.view[position : position + 4] != b"PK\x06\x06" or disks > 1:
            raise source.error("has a zip64 end record that is not where it must be")
        fields = _END64.unpack(source.view[position:locator])
        _, length, _, _, disk_a, disk_b, here64, entries64, size64, start64 = fields
        if length != _END64.size - 12 or (disk64, disk_a, disk_b) != (0, 0, 0):
            raise source.error("has a zip64 end record of an unknown kind")
        pairs = [(here, here64), (entries, entries64), (size, size64), (start, start64)]
        limits = [_FULL16, _FULL16, _FULL32, _FULL32]
        if any(short not in (long, full) for (short, long), full in zip(pairs, limits, strict=True)):
            raise source.error("has two zip end records that contradict each other")
        here, entries, size, start, stop = here64, entries64, size64, start64, position
    if (disk, first_disk) not in ((0, 0), (_FULL16, _FULL16)) or here != entries:
        raise source.error("is one part of a zip archive in several parts")
    if start + size != stop:
        raise source.error("has a zip directory that does not end where its end record begins")
    return _Directory(entries, start, stop)


def _read_directory(source: Source, directory: _Directory) -> list[_Entry]:
    """Return the entries of the central directory, which must fill it exactly."""
    entries, position = [], directory.start
    for _ in range(directory.entries):
        record = source.view[position : position + _CENTRAL.size]
        if position + _CENTRAL.size > directory.stop or record[:4] != b"PK\x01\x02":
            raise source.error(f"has a damaged zip directory at byte {position}")
        fields = _CENTRAL.unpack(record)
        _, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment, disk, _, _, offset = fields
        position += _CENTRAL.size
        raw_name = bytes(source.view[position : position + name_length])
        extra = source.view[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment
        if position > directory.stop:
            raise source.error("has a zip directory that runs over its end")
        name = _decode(source, raw_name, flags)
        size, packed, offset, disk = _zip64(source, name, extra, (size, packed, offset), disk)
        if flags & ~_KNOWN_FLAGS or method not in (STORED, DEFLATED) or disk:
            raise source.error(f"member {quote(name)}: is encrypted, or packed in a way that is not supported")
        if method == STORED and packed != size:
            raise source.error(f"member {quote(name)}: is stored, but states two sizes, {packed} and {size}")
        entries.append(_Entry(name, raw_name, flags, method, crc, packed, size, offset))
    if position != directory.stop:
        raise source.error(f"has {directory.stop - position} bytes in its zip directory that belong to no member")
    return entries


def _decode(source: Source, raw: bytes, flags: int) -> str:
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        raise source.error("has a member whose name is not UTF-8") from None


def _extras(source: Source, name: str, extra: memoryview) -> dict[int, memoryview]:
    """Return the blocks of an extra field by id."""
    blocks, position = {}, 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if position + 4 + length > len(extra):
            break
        blocks[kind] = extra[position + 4 : position + 4 + length]
        position += 4 + length
    if position != len(extra):
        raise source.error(f"member {quote(name)}: has a damaged extra field")
    return blocks


def _zip64(
    source: Source, name: str, extra: memoryview, values: tuple[int, int, int], disk: int
) -> tuple[int, int, int, int]:
    """Return (size, packed size, offset, disk) with those that did not fit in 32 bits taken from the extra field."""
    block = _extras(source, name, extra).get(1, memoryview(b""))
    wide, position = [], 0
    for value in values:
        if value == _FULL32:
            if position + 8 > len(block):
                raise source.error(f"member {quote(name)}: lacks its zip64 sizes")
            (value,) = struct.unpack_from("<Q", block, position)
            position += 8
        wide.append(value)
    if disk == _FULL16 and position + 4 <= len(block):
        (disk,) = struct.unpack_from("<I", block, position)
    return wide[0], wide[1], wide[2], disk


def _check_local(source: Source, entry: _Entry, limit: int) -> int:
    """Return where the bytes of a member start; its own header must agree with the directory."""
    if entry.offset + _LOCAL.size > limit or source.view[entry.offset : entry.offset + 4] != b"PK\x03\x04":
        raise source.error(f"member {quote(entry.name)}: has no header at byte {entry.offset}")
    fields = _LOCAL.unpack(source.view[entry.offset : entry.offset + _LOCAL.size])
    _, _, flags, method, _, _, crc, packed, size, name_length, extra_length = fields
    name_start = entry.offset + _LOCAL.size
    start = name_start + name_length + extra_length
    if start + entry.packed > limit:
        raise source.error(f"member {quote(entry.name)}: runs into the zip directory")
    name = bytes(source.view[name_start : name_start + name_length])
    extra = source.view[name_start + name_length : start]
    if (name, method, flags & _DESCRIPTOR) != (entry.raw_name, entry.method, entry.flags & _DESCRIPTOR):
        raise source.error(f"member {quote(entry.name)}: its header and the zip directory contradict each other")
    _extras(source, entry.name, extra)
    if not flags & _DESCRIPTOR:
        size, packed, _, _ = _zip64(source, entry.name, extra, (size, packed, 0), 0)
        if (crc, packed, size) != (entry.crc, entry.packed, entry.size):
            raise source.error(f"member {quote(entry.name)}: its header and the zip directory state different sizes")
    return start


def _check_descriptor(source: Source, entry: _Entry, stop: int, following: int) -> int:
    """Return where a member ends: after its data descriptor, if its flags announce one."""
    if not entry.flags & _DESCRIPTOR:
        return stop
    # The signature is optional, and nothing but the distance to what follows tells 32-bit from 64-bit sizes.
    for layout in ("<I2I", "<4sI2I", "<I2Q", "<4sI2Q"):
        if stop + struct.calcsize(layout) == following:
            fields = struct.unpack(layout, source.view[stop:following])
            if fields[-3:] == (entry.crc, entry.packed, entry.size) and fields[0] in (b"PK\x07\x08", entry.crc):
                return following
    raise source.error(f"member {quote(entry.name)}: is not followed by its sizes, as its header announces")
