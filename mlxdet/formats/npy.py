"""npy: one numpy array.

    "\\x93NUMPY" | version, 2 bytes | length of the header, u16 or u32 | header, a Python dict | data

MLX writes bfloat16 as the void dtype `|V2`, which numpy has no better name for either: V2 is read as BF16. Big-endian
and Fortran-ordered data are legal and are turned into little-endian C order. Object arrays are pickles, and refused.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlxdet.formats.checkpoint import Checkpoint
from mlxdet.formats.checks import check_shape, count
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import DeferredTensor, FormatError, Tensor, dtype_name

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 16
_ITEM = r"(?:'descr'\s*:\s*'[^'\\]*'|'fortran_order'\s*:\s*(?:True|False)|'shape'\s*:\s*\([\d,L\s]*\))"
_HEADER = re.compile(rf"\s*\{{\s*{_ITEM}\s*,\s*{_ITEM}\s*,\s*{_ITEM}\s*,?\s*\}}\s*")
_FIELDS = {
    "descr": re.compile(r"'descr'\s*:\s*'([^']*)'"),
    "fortran_order": re.compile(r"'fortran_order'\s*:\s*(True|False)"),
    "shape": re.compile(r"'shape'\s*:\s*\(((?:\s*\d{1,20}L?\s*,)*\s*(?:\d{1,20}L?\s*)?)\)"),
}
_PLAIN = re.compile(r"[<>|](?:[fiuc]\d{1,2}|b1|[SUV]\d{1,8}|[mM]8(?:\[\d{0,6}[a-zA-Z]{1,2}\])?)")


class Header(NamedTuple):
    """What the header of an npy file says. `data` is the offset of the data in the file, `nbytes` its length."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    data: int
    nbytes: int


def looks_like(source: Source) -> bool:
    """Return whether the file starts with npy's magic bytes."""
    return source.view[:6] == MAGIC


def parse_header(source: Source, name: str, head: bytes, size: int) -> Header:
    """Return the header of the npy file that starts with `head` and is `size` bytes long in all.

    `head` must reach over the header: MAX_HEADER + 12 bytes, or the whole file. Raises FormatError, naming `name`.
    """

    def refuse(message: str) -> FormatError:
        return source.error(message, name)

    if head[:6] != MAGIC or len(head) < 10:
        raise refuse("is not an npy array")
    version = (head[6], head[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise refuse(f"npy version {version[0]}.{version[1]} is not known")
    start = 10 if version == (1, 0) else 12
    length = int.from_bytes(head[8:start], "little")
    if length > MAX_HEADER or start + length > min(size, len(head)):
        raise refuse(f"states a header of {length} bytes: truncated or damaged")
    text = head[start : start + length].decode("latin-1").replace('"', "'")
    found = {key: pattern.findall(text) for key, pattern in _FIELDS.items()}
    if not _HEADER.fullmatch(text) or any(len(values) != 1 for values in found.values()):
        raise refuse("its header is damaged, or describes a structured dtype; only plain arrays can be read")
    descr, fortran = found["descr"][0], found["fortran_order"][0] == "True"
    if descr[1:2] == "O":
        raise refuse("is an object array, that is, a pickle; save its numbers as a plain array")
    dtype = _dtype(descr)
    if dtype is None:
        raise refuse(f"dtype {quote(descr)} is not known")
    shape = check_shape(source, name, [int(size) for size in re.findall(r"\d+", found["shape"][0])])
    nbytes = count(shape) * dtype.itemsize
    if start + length + nbytes != size:
        raise refuse(f"has {size - start - length} bytes, but {descr} {list(shape)} needs {nbytes}")
    named = "BF16" if dtype == np.dtype("V2") else dtype_name(dtype) or descr[1:]
    return Header(named, dtype, shape, fortran, start + length, nbytes)


def _dtype(descr: str) -> np.dtype | None:
    if not _PLAIN.fullmatch(descr):
        return None
    try:
        return np.dtype(descr)
    except (TypeError, ValueError):
        return None


def as_tensor(header: Header, data: Callable[[], np.ndarray]) -> Tensor:
    """Return the tensor of `header`; `data` gives its bytes in the order of the file."""
    turned = header.fortran and len(header.shape) > 1
    if header.nbytes == 0 or (not turned and header.dtype == header.dtype.newbyteorder("<")):
        return DeferredTensor(header.name, header.shape, data)

    def normal() -> np.ndarray:
        flat = data().view(header.dtype)
        array = flat.reshape(header.shape[::-1]).T if turned else flat
        return np.asarray(array, header.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8)

    return DeferredTensor(header.name, header.shape, normal)


def read(source: Source) -> Checkpoint:
    """Return the one array of an npy file, named "array". Raises FormatError."""
    header = parse_header(source, "array", bytes(source.view[: MAX_HEADER + 12]), source.size)
    tensor = as_tensor(header, lambda: source.array[header.data :])
    return Checkpoint(source.path, "npy", {"array": tensor})
