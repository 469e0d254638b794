"""safetensors: a strict reader and a canonical writer.

    u64 length of the header | header, JSON | data section

Offsets count from the data section, byte 8 + length, never from the start of the file. The reader accepts a file only
if its tensors tile the data section to the last byte. The writer is canonical: tensors in name order, a header in one
fixed spelling, padded with spaces to a multiple of 8, no metadata. So equal tensors give equal files, which neither the
safetensors package (it writes metadata in random order) nor MLX (it lays tensors out in hash-map order) promises.

Format: https://github.com/huggingface/safetensors
"""

import json
import os
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from mlxdet.formats.checks import MAX_HEADER, Span, byte_size, check_shape, check_tiling, is_count, parse_json
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import BITS, FormatError, Tensor

_FIELDS = {"dtype", "shape", "data_offsets"}


def looks_like(source: Source) -> bool:
    """Return whether the file starts as a safetensors file does: a possible length, then an opening brace."""
    head = source.view[:9]
    return len(head) == 9 and head[8] == ord("{") and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER


def parse(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of `source`, in name order, and its metadata. Raises FormatError."""
    if source.size < 8:
        raise source.error("is too short for a safetensors file")
    length = int.from_bytes(source.view[:8], "little")
    base = 8 + length
    if length > MAX_HEADER or base > source.size:
        raise source.error(f"declares a header of {length} bytes, but has {source.size}: truncated, or not safetensors")
    header = parse_json(source, 8, base, "its header")
    if not isinstance(header, dict) or source.view[8] != ord("{"):
        raise source.error("has a header that is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is None:  # MLX writes null where there is none
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise source.error("has a __metadata__ that is not a table of strings")
    spans = [_span(source, name, entry) for name, entry in header.items()]
    check_tiling(source, spans, base, source.size)
    tensors = {}
    for span in sorted(spans, key=lambda span: span.name):
        entry = header[span.name]
        data = source.array[base + span.start : base + span.stop]
        tensors[span.name] = Tensor(entry["dtype"], tuple(entry["shape"]), data)
    return tensors, dict(metadata)


def _span(source: Source, name: str, entry: object) -> Span:
    """Return the checked range of one header entry."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise source.error("its header entry does not have exactly dtype, shape and data_offsets", name)
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise source.error(f"dtype {quote(dtype)} is not known", name)
    shape = check_shape(source, name, entry["shape"])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(offset) for offset in offsets):
        raise source.error("data_offsets are not two byte positions", name)
    start, stop = offsets
    needed = byte_size(source, name, shape, BITS[dtype])
    if stop - start != needed:
        raise source.error(f"has {stop - start} bytes, but {dtype} {list(shape)} needs {needed}", name)
    return Span(start, stop, name)


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the file at `path`, in name order, and its metadata.

    The bytes stay in the file (memory-mapped, read-only); only the header is read. Raises FormatError, naming file and
    tensor, for anything but a whole, exact file: truncation, trailing bytes, gaps, overlaps, duplicate names, sizes
    that do not follow from shapes.
    """
    return parse(Source(path))


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to `file` in the canonical layout: the same tensors always give the same bytes.

    Raises FormatError, before anything is written, for a dtype that safetensors does not have, bytes that do not fit
    the shape, or a name that cannot be stored.
    """
    header: dict[str, object] = {}
    position = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if name == "__metadata__":
            raise FormatError("a tensor cannot be named '__metadata__' in safetensors")
        if tensor.dtype not in BITS:
            raise FormatError(f"tensor {quote(name)}: safetensors has no dtype {quote(tensor.dtype)}")
        size, bits = tensor.data.nbytes, BITS[tensor.dtype]
        for length in tensor.shape:
            bits *= length
        if bits != size * 8 or min(tensor.shape, default=0) < 0:
            raise FormatError(f"tensor {quote(name)}: {size} bytes do not fit {tensor.dtype} {list(tensor.shape)}")
        shape = [int(length) for length in tensor.shape]
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    try:
        encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise FormatError("a tensor name holds characters that UTF-8 cannot store") from None
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER:
        raise FormatError(f"{len(tensors)} tensors need a header of {len(encoded)} bytes, more than {MAX_HEADER}")
    _write(file, memoryview(len(encoded).to_bytes(8, "little") + encoded))
    for name in header:
        _write(file, np.ascontiguousarray(tensors[name].data).data)


def _write(file: BinaryIO, data: memoryview) -> None:
    """Write all of `data`: an unbuffered file may take less than it is given (on Linux never above 2 GiB a call)."""
    while data.nbytes:
        written = file.write(data)
        data = data[data.nbytes if written is None else written :]
