"""GGUF: the single-file format of llama.cpp.

    "GGUF" | version u32 | tensor count u64 | key count u64 | keys and values | tensor entries | padding | data section

Tensor offsets count from the data section, which starts at the next multiple of `general.alignment` (32 unless given)
after the entries, and are multiples of it. Dimensions are stored fastest first and are reversed here. Quantised tensors
stay what they are, blocks of bytes under ggml's name for the type. Versions 2 and 3, either byte order: plain numbers
become little-endian; the inside of a quantised block does not, so a big-endian file's quantised types carry the suffix
":be" and never pass for the others.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np

from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import Span, check_shape, check_tiling, count
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import BITS, DeferredTensor, Tensor

MAGIC = b"GGUF"
MAX_NAME = 1 << 16
MAX_ITEMS = 10_000_000  # strings and nested arrays in all of the metadata; the largest tokenizers have under a million
MAX_DEPTH = 4
SHOWN = 64  # longer arrays of metadata are kept as a digest


class Kind(NamedTuple):
    """One of ggml's types: `nbytes` bytes hold `block` elements."""

    name: str
    block: int
    nbytes: int


# ggml_type in ggml.h. Types 4, 5 and 31 to 38 were removed.
KINDS = {
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 24: Kind("I8", 1, 1), 25: Kind("I16", 1, 2), 26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8), 28: Kind("F64", 1, 8), 30: Kind("BF16", 1, 2),
    2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 6: Kind("Q5_0", 32, 22), 7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34), 9: Kind("Q8_1", 32, 40), 10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144), 13: Kind("Q5_K", 256, 176), 14: Kind("Q6_K", 256, 210), 15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66), 17: Kind("IQ2_XS", 256, 74), 18: Kind("IQ3_XXS", 256, 98), 19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18), 21: Kind("IQ3_S", 256, 110), 22: Kind("IQ2_S", 256, 82), 23: Kind("IQ4_XS", 256, 136),
    29: Kind("IQ1_M", 256, 56), 34: Kind("TQ1_0", 256, 54), 35: Kind("TQ2_0", 256, 66), 39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36), 41: Kind("Q1_0", 128, 18),
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


def looks_like(source: Source) -> bool:
    """Return whether the file starts with GGUF's magic bytes."""
    return source.view[:4] == MAGIC


class _Cursor:
    """Reads the header from front to back, refusing to run over the end of the file."""

    def __init__(self, source: Source):
        self.source, self.position, self.order, self.items = source, 4, "<", 0

    def take(self, length: int) -> memoryview:
        start, stop = self.position, self.position + length
        if stop > self.source.size:
            raise self.source.error(f"ends inside its header, at byte {start}: truncated")
        self.position = stop
        return self.source.view[start:stop]

    def number(self, code: str) -> int:
        return int(struct.unpack(self.order + code, self.take(struct.calcsize(code)))[0])

    def text(self, what: str, limit: int) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.source.error(f"has a {what} of {length} bytes, more than {limit}")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.source.error(f"has a {what} that is not UTF-8") from None

    def count_items(self, number: int) -> None:
        self.items += number
        if self.items > MAX_ITEMS:
            raise self.source.error(f"has more than {MAX_ITEMS} items of metadata")

    def value(self, key: str, kind: int, depth: int = 0) -> object:
        """Return one value of metadata; an array of more than SHOWN elements as its length and digest."""
        if kind == _STRING:
            return self.text(f"string in {quote(key)}", self.source.size)
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        if kind not in _SCALARS:
            raise self.source.error(f"key {quote(key)} has a value of unknown type {kind}")
        (value,) = struct.unpack(self.order + _SCALARS[kind], self.take(struct.calcsize(_SCALARS[kind])))
        if kind == _BOOL and value > 1:
            raise self.source.error(f"key {quote(key)} has {value} for a truth value")
        return bool(value) if kind == _BOOL else value

    def array(self, key: str, depth: int) -> object:
        kind, length = self.number("I"), self.number("Q")
        if depth > MAX_DEPTH:
            raise self.source.error(f"key {quote(key)} has arrays nested more than {MAX_DEPTH} deep")
        start = self.position
        if kind in _SCALARS and kind != _BOOL and length > SHOWN:
            self.take(length * struct.calcsize(_SCALARS[kind]))
        else:
            self.count_items(length)
            values = [self.value(key, kind, depth) for _ in range(length)]
            if length <= SHOWN:
                return values
        digest = hashlib.blake2b(self.source.view[start : self.position], digest_size=16).hexdigest()
        return {"length": length, "blake2b": digest}


def read(source: Source) -> Checkpoint:
    """Return the tensors and the metadata of a GGUF file. Raises FormatError."""
    cursor = _Cursor(source)
    version = cursor.number("I")
    if version not in (2, 3):
        cursor.order, swapped = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped not in (2, 3):
            raise source.error(f"GGUF version {min(version, swapped)} is not known; versions 2 and 3 are")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        cursor.count_items(1)
        key = cursor.text("key", MAX_NAME)
        if key in metadata:
            raise source.error(f"has the key {quote(key)} twice")
        metadata[key] = cursor.value(key, cursor.number("I"))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or isinstance(align, bool) or not 0 < align <= 1 << 20 or align & (align - 1):
        raise source.error(f"general.alignment is {quote(align)}, not a power of two")
    entries: dict[str, tuple[tuple[int, ...], Kind, Span]] = {}
    for _ in range(tensor_count):
        name, shape, kind, span = _entry(cursor)
        if name in entries:
            raise source.error("is there twice", name)
        entries[name] = (shape, kind, span)
    base = -(-cursor.position // align) * align
    if not entries and source.size == cursor.position:
        base = cursor.position  # without tensors the padding is optional
    if base > source.size or not source.is_zero(cursor.position, base):
        raise source.error(f"has no zero padding up to its data section at byte {base}: truncated or damaged")
    check_tiling(source, [span for _, _, span in entries.values()], base, source.size, align, tail=True)
    tensors = {name: _tensor(source, entry, base, cursor.order) for name, entry in entries.items()}
    return Checkpoint(source.path, "gguf", by_name(tensors), metadata)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], Kind, Span]:
    """Return the next tensor entry; its span is relative to the data section."""
    source = cursor.source
    cursor.count_items(1)
    name = cursor.text("tensor name", MAX_NAME)
    dimensions = cursor.number("I")
    if dimensions > 64:
        raise source.error(f"has {dimensions} dimensions", name)
    shape = check_shape(source, name, [cursor.number("Q") for _ in range(dimensions)][::-1])
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in KINDS:
        raise source.error(f"type {number} is not known", name)
    kind = KINDS[number]
    if (shape[-1] if shape else 1) % kind.block:
        raise source.error(f"rows of {shape[-1] if shape else 1} elements are not whole blocks of {kind.name}", name)
    return name, shape, kind, Span(offset, offset + count(shape) // kind.block * kind.nbytes, name)


def _tensor(source: Source, entry: tuple[tuple[int, ...], Kind, Span], base: int, order: str) -> Tensor:
    shape, kind, span = entry
    data = source.array[base + span.start : base + span.stop]
    if order == "<" or kind.nbytes == 1:
        return Tensor(kind.name, shape, data)
    if kind.name not in BITS:
        return Tensor(kind.name + ":be", shape, data)
    return DeferredTensor(
        kind.name, shape, lambda: data.view(f">u{kind.nbytes}").astype(f"<u{kind.nbytes}").view(np.uint8)
    )
