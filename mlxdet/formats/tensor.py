"""A tensor of a checkpoint as every reader of `mlxdet.formats` gives it: dtype name, shape and raw bytes.

The bytes are the content: little-endian, C order, a read-only view of the mapped file wherever the file allows. Nothing
is widened, narrowed or interpreted here, so two tensors are the same bits exactly when dtype, shape and bytes are
equal, and dtypes that numpy does not know (bfloat16, float8, quantised blocks) need no special care.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Bits per element of the dtypes of safetensors, under safetensors' own names. Raw names ("Q4_0", "V1") have no entry.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

# The dtypes that numpy has itself.
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
_NAMES = {np.dtype(code): name for name, code in NUMPY.items()}


def dtype_name(dtype: np.dtype) -> str | None:
    """Return the name of a numpy dtype of either byte order, or None if it has none here."""
    return _NAMES.get(dtype.newbyteorder("<"))


class FormatError(ValueError):
    """A checkpoint that cannot be read or proven whole. The message names the file and, if there is one, the tensor."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor, `data` as a 1-D uint8 array of its bytes.

    `dtype` is safetensors' name for it, or a raw name ("Q4_0") where the bytes are opaque. Reading `data` can raise
    FormatError in formats that carry checksums: a part of a file is proven before its first byte is handed out.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def to_numpy(self) -> np.ndarray:
        """Return the tensor as a numpy array of `shape`, without a copy.

        A dtype unknown to numpy comes as unsigned integers of its width, that is, as bits (BF16 as uint16, F8 as
        uint8). Raises ValueError for raw dtypes and for those with several elements in a byte.
        """
        if self.dtype in NUMPY:
            return self.data.view(NUMPY[self.dtype]).reshape(self.shape)
        bits = BITS.get(self.dtype, 0)
        if bits not in (8, 16):
            raise ValueError(f"{self.dtype} has no numpy form; compare its bytes")
        return self.data.view(f"<u{bits // 8}").reshape(self.shape)


class DeferredTensor(Tensor):
    """A tensor whose bytes are not in the file as they are (strided, big-endian, compressed) or must first be proven.

    They are made anew at each reading of `data` and not kept, so that walking a checkpoint holds one tensor at a time.
    """

    _read: Callable[[], np.ndarray]

    def __init__(self, dtype: str, shape: tuple[int, ...], read: Callable[[], np.ndarray]):
        # Tensor is frozen, so its own fields are set as its generated constructor sets them.
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "_read", read)

    @property
    def data(self) -> np.ndarray:
        return self._read()

    def __repr__(self) -> str:
        return f"DeferredTensor(dtype={self.dtype!r}, shape={self.shape!r})"


def from_numpy(array: np.ndarray, dtype: str | None = None) -> Tensor:
    """Return `array` as a Tensor, copying only what is not yet little-endian and in C order.

    `dtype` names the dtype of arrays that hold bits, such as uint16 for "BF16"; the widths must agree. Raises
    ValueError for a dtype without a name here.
    """
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    name = dtype or dtype_name(plain.dtype)
    if name is None:
        raise ValueError(f"numpy dtype {array.dtype} has no checkpoint dtype")
    if dtype is not None and BITS.get(dtype) != plain.dtype.itemsize * 8:
        raise ValueError(f"{dtype} does not have the width of numpy's {array.dtype}")
    return Tensor(name, plain.shape, plain.reshape(-1).view(np.uint8))
