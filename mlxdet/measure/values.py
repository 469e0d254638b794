"""What the raw bytes of a tensor are worth: codes to exact float64 values, and to integers in the order of the values.

A float dtype of 64, 32 or 16 bits is sign and magnitude, so its codes, read as signed integers, are put in order of
value by integer arithmetic. Those of 8 bits go through a table of their 256 values. Every value of every dtype here is
exact in float64, except 64-bit integers, which are subtracted as integers first (see `numbers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

Codes = np.ndarray
INTEGERS = {"I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "U8": "u1", "U16": "u2", "U32": "u4", "U64": "u8",
            "BOOL": "u1"}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How to read the codes of a dtype: `code` is their numpy dtype, `parts` how many make one element.

    `exact`: integers, whose codes are their values. `values`: codes to float64. `ordered`: codes to integers such that
    neighbouring values differ by 1, and +0 and -0 by 0. `finite`: the mask of finite codes, or None if all are.
    `signed`: codes are sign and magnitude, read as signed integers.
    """

    code: str
    values: Callable[[Codes], np.ndarray]
    ordered: Callable[[Codes], np.ndarray]
    finite: Callable[[Codes], np.ndarray | None]
    exact: bool = False
    signed: bool = False


def layout(dtype: str) -> Layout | None:
    """Return the layout of a checkpoint dtype, or None for one whose bytes are opaque (quantised, several per byte).

    The two parts of a complex number are two slots.
    """
    if dtype in INTEGERS:
        return Layout("<" + INTEGERS[dtype], _to_float64, _to_int, lambda codes: None, exact=True)
    return _FLOATS.get(dtype) or (_tabled(dtype) if dtype in _EIGHT_BITS else None)


def _to_float64(codes: Codes) -> np.ndarray:
    return codes.astype(np.float64)


def _to_int(codes: Codes) -> np.ndarray:
    return codes


def _float(code: str, infinity: int, values: Callable[[Codes], np.ndarray]) -> Layout:
    """Return the layout of a sign-and-magnitude float; magnitudes from `infinity` on are infinite or NaN."""
    dtype = np.dtype(code)
    width = dtype.itemsize * 8 - 1
    magnitude = dtype.type((1 << width) - 1)
    smallest = dtype.type(infinity)

    def ordered(codes: Codes) -> np.ndarray:
        sign = codes >> dtype.type(width)  # 0, or -1 where negative
        flipped = sign & magnitude
        flipped ^= codes
        flipped -= sign
        return flipped

    unsigned = np.dtype(f"<u{dtype.itemsize}")
    negative = unsigned.type(infinity) | unsigned.type(1 << width)

    def finite(codes: Codes) -> np.ndarray | None:
        # Two reductions make no copy: the largest positive code, and (read as unsigned) the largest negative one.
        if codes.size == 0 or (codes.max() < smallest and codes.view(unsigned).max() < negative):
            return None
        return (codes & magnitude) < smallest

    return Layout(code, values, ordered, finite, signed=True)


def _bfloat16(codes: Codes) -> np.ndarray:
    return (codes.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


_SINGLE = _float("<i4", 0x7F800000, lambda codes: codes.view("<f4").astype(np.float64))
_DOUBLE = _float("<i8", 0x7FF0000000000000, lambda codes: codes.view("<f8"))
_FLOATS = {
    "F64": _DOUBLE,
    "C128": _DOUBLE,
    "F32": _SINGLE,
    "C64": _SINGLE,
    "F16": _float("<i2", 0x7C00, lambda codes: codes.view("<f2").astype(np.float64)),
    "BF16": _float("<i2", 0x7F80, _bfloat16),
}

# name -> (exponent bits, mantissa bits, exponent bias, which codes are not finite), as the OCP 8-bit specifications
# (E4M3 without infinities, E5M2 as IEEE) and the "FNUZ" variants (no infinity, no negative zero, NaN at 0x80) say.
_EIGHT_BITS = {
    "F8_E4M3": (4, 3, 7, (0x7F, 0xFF)),
    "F8_E5M2": (5, 2, 15, tuple(range(0x7C, 0x80)) + tuple(range(0xFC, 0x100))),
    "F8_E4M3FNUZ": (4, 3, 8, (0x80,)),
    "F8_E5M2FNUZ": (5, 2, 16, (0x80,)),
    "F8_E8M0": (8, 0, 127, (0xFF,)),
}


@cache
def _tabled(dtype: str) -> Layout:
    exponent_bits, mantissa_bits, bias, special = _EIGHT_BITS[dtype]
    table = np.empty(256)
    for code in range(256):
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        # E8M0 is a bare power of two: no sign, no subnormals, no zero.
        size = (
            np.ldexp(mantissa, 1 - bias) if exponent == 0 and mantissa_bits else np.ldexp(1 + mantissa, exponent - bias)
        )
        table[code] = -size if code & 0x80 and mantissa_bits else size
    is_finite = np.ones(256, bool)
    is_finite[list(special)] = False
    table[~is_finite] = np.nan
    if dtype == "F8_E5M2":
        table[0x7C], table[0xFC] = np.inf, -np.inf
    order = np.zeros(256, np.int16)
    order[is_finite] = np.unique(table[is_finite], return_inverse=True)[1]

    def finite(codes: Codes) -> np.ndarray | None:
        mask = is_finite[codes]
        return None if mask.all() else mask

    return Layout("u1", lambda codes: table[codes], lambda codes: order[codes], finite)
