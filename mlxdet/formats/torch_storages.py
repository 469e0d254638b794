"""Storages and windows: how PyTorch keeps tensors in a file.

A storage is a piece of the file, named by a persistent id in the pickle. A tensor is a window on one: an offset and
strides, both in elements. Several tensors can look into one storage, so a window may lie in any order, repeat elements
or leave some out; here its elements are brought into C order and little-endian bytes.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mlxdet.formats.checks import MAX_EXPANDED, count, is_count
from mlxdet.formats.pickles import Global, Persistent
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import DeferredTensor, Tensor

# The storage classes and dtypes of PyTorch: name and bytes per element. Quantised ones are here so that a file that has
# them can be walked to its end.
_STORAGES = {
    "DoubleStorage": ("F64", 8), "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8), "IntStorage": ("I32", 4), "ShortStorage": ("I16", 2), "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1), "ComplexFloatStorage": ("C64", 8),
    "ComplexDoubleStorage": ("C128", 16), "UntypedStorage": ("U8", 1), "_UntypedStorage": ("U8", 1),
    "QInt8Storage": ("QINT8", 1), "QUInt8Storage": ("QUINT8", 1), "QInt32Storage": ("QINT32", 4),
    "QUInt4x2Storage": ("QUINT4X2", 1), "QUInt2x4Storage": ("QUINT2X4", 1),
}  # fmt: skip
DTYPES = {
    "float64": ("F64", 8), "double": ("F64", 8), "float32": ("F32", 4), "float": ("F32", 4), "float16": ("F16", 2),
    "half": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8), "long": ("I64", 8), "int32": ("I32", 4),
    "int": ("I32", 4), "int16": ("I16", 2), "short": ("I16", 2), "int8": ("I8", 1), "uint64": ("U64", 8),
    "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1), "complex64": ("C64", 8),
    "cfloat": ("C64", 8), "complex128": ("C128", 16), "cdouble": ("C128", 16), "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1), "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip


class Storage(NamedTuple):
    """A piece of file that tensors look into: `size` elements of `width` bytes."""

    key: str
    dtype: str
    width: int
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * self.width


class Window(NamedTuple):
    """A tensor as PyTorch stores it: elements of a storage, by offset and strides, all counted in elements."""

    storage: str
    dtype: str
    width: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(source: Source, reference: Persistent) -> tuple[Storage, int]:
    """Return the storage that a persistent id names, and the offset of the view on it (files of PyTorch 0.x)."""
    identity = reference.id
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise source.error("refers to something that is no storage of a tensor")
    _, kind, key, _, size = identity[:5]
    if not isinstance(kind, Global) or kind.name not in _STORAGES or kind.module.split(".")[0] != "torch":
        named = quote(str(kind)) if isinstance(kind, Global) else "that is no class"
        raise source.error(f"has a storage of the unknown type {named}")
    if not isinstance(key, str) or not is_count(size):
        raise source.error("has a storage without a key or size")
    dtype, width = _STORAGES[kind.name]
    offset = 0
    if len(identity) == 6 and identity[5] is not None:
        view = identity[5]
        if not isinstance(view, tuple) or len(view) != 3 or not is_count(view[1]) or not is_count(view[2]):
            raise source.error(f"storage {quote(key)}: has a damaged view")
        offset = view[1]
    return Storage(key, dtype, width, size), offset


def storages(source: Source, references: Iterable[Persistent]) -> dict[str, Storage]:
    """Return the storages that `references` name, by key. Two descriptions of one storage must agree."""
    known: dict[str, Storage] = {}
    for reference in references:
        if isinstance(reference.id, tuple) and reference.id[:1] == ("module",):
            continue  # the source text of a class, in files of PyTorch before 1.6
        storage, _ = storage_of(source, reference)
        if known.setdefault(storage.key, storage) != storage:
            raise source.error(f"storage {quote(storage.key)}: is described in two ways")
    return known


def as_tensor(source: Source, name: str, window: Window, data: Callable[[str], np.ndarray], big_endian: bool) -> Tensor:
    """Return the tensor of a window. `data` gives the bytes of a storage by key, in the byte order of the file."""
    elements, width = count(window.shape), window.width
    expected = 1
    contiguous = True
    for length, step in zip(reversed(window.shape), reversed(window.strides), strict=True):
        contiguous &= length == 1 or step == expected
        expected *= length
    swapped = big_endian and width > 1
    start = window.offset * width

    def read() -> np.ndarray:
        if elements == 0:
            return np.empty(0, np.uint8)
        if contiguous and not swapped:
            return data(window.storage)[start : start + elements * width]
        if elements * width > MAX_EXPANDED:
            raise source.error(f"repeats its storage to {elements * width} bytes, more than {MAX_EXPANDED}", name)
        # Complex numbers are swapped by their halves, everything else by its width.
        code = f"c{width}" if window.dtype in ("C64", "C128") else f"u{width}"
        raw = data(window.storage)
        flat = raw[start : raw.size - (raw.size - start) % width].view((">" if big_endian else "<") + code)
        # The stride of a dimension of one element is never used, and may be anything.
        steps = [0 if length == 1 else step * width for length, step in zip(window.shape, window.strides, strict=True)]
        view = np.lib.stride_tricks.as_strided(flat, window.shape, steps, writeable=False)
        return np.asarray(view, "<" + code, order="C").reshape(-1).view(np.uint8)

    return DeferredTensor(window.dtype, window.shape, read)
