"""The numbers of a pair of tensors (a the reference, b the other): distances in float64, and what cannot be measured.

Tensors are walked in blocks that stay in the processor's cache, and sums are added in the order of the blocks. Whether
bytes are equal is found out on several threads. Measuring is done on one: its numpy calls are so short that a second
thread mostly waits for the interpreter (two threads took 1.7 times as long).
"""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mlxdet.measure.values import Layout, layout

_Kernel = Callable[[Layout, Layout, np.ndarray, np.ndarray], "Numbers"]
# Slots handled at a time: float64 copies of 96 kB stay in the cache, and below the size from which malloc asks the
# kernel for fresh pages each time (128 kB), which would cost more than the arithmetic.
BLOCK = 12 << 10
SCAN = 1 << 16  # the same where nothing but the mask of what differs is made
TASK = 1 << 20  # slots handed to a thread at a time


@dataclass(frozen=True)
class Numbers:
    """What was counted and summed over some slots. Numbers of parts add up to those of the whole with `+`.

    `differing` counts slots whose bits differ. `unmatched` counts slots that are NaN or infinite in one tensor and not
    in the same way in the other: they have no distance. Slots that are not finite stay out of every sum and maximum.
    The four sums of squares and products are in units of 4**`exponent`, so that no value of float64 overflows them.
    """

    slots: int = 0
    differing: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    unmatched: int = 0
    signed_zeros: int = 0  # +0 in one, -0 in the other
    opaque: int = 0  # differing bytes of dtypes without a numeric form
    max_abs: float = 0.0
    max_ulp: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    exponent: int = 0

    def __add__(self, other: "Numbers") -> "Numbers":
        exponent = max((n.exponent for n in (self, other) if n.aa or n.bb), default=0)
        x, y = self._at(exponent), other._at(exponent)
        return Numbers(
            x.slots + y.slots, x.differing + y.differing, x.nan_a + y.nan_a, x.nan_b + y.nan_b, x.inf_a + y.inf_a,
            x.inf_b + y.inf_b, x.unmatched + y.unmatched, x.signed_zeros + y.signed_zeros, x.opaque + y.opaque,
            max(x.max_abs, y.max_abs), max(x.max_ulp, y.max_ulp), x.aa + y.aa, x.bb + y.bb, x.ab + y.ab, x.dd + y.dd,
            exponent,
        )  # fmt: skip

    def _at(self, exponent: int) -> "Numbers":
        if exponent == self.exponent:
            return self
        shift = 2 * (self.exponent - exponent)
        aa, bb, ab, dd = (math.ldexp(v, shift) for v in (self.aa, self.bb, self.ab, self.dd))
        return replace(self, exponent=exponent, aa=aa, bb=bb, ab=ab, dd=dd)

    def counts(self) -> "Numbers":
        """Return the counts alone, without sums and maxima."""
        return replace(self, max_abs=0.0, max_ulp=0, aa=0.0, bb=0.0, ab=0.0, dd=0.0, exponent=0)

    @property
    def identical(self) -> bool:
        """Whether all bits are the same."""
        return self.differing == 0

    @property
    def undefined(self) -> str | None:
        """Why there is no relative distance, or None if there is one."""
        if self.opaque:
            return f"{counted(self.opaque, 'differing byte')} of a dtype without numeric form"
        if self.unmatched:
            return f"NaN or infinite on one side only: {counted(self.unmatched, 'slot')}"
        if self.differing and self.aa == 0:
            return "the reference is zero" + (" where it is finite" if self.nan_a or self.inf_a else "")
        return None

    @property
    def relfro(self) -> float | None:
        """||a - b|| / ||a||, or None where it is undefined."""
        if self.undefined:
            return None
        return math.sqrt(self.dd) / math.sqrt(self.aa) if self.differing else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between a and b: 1 for the same bits, None where one is zero or has no distance."""
        if self.slots and not self.differing:
            return 1.0
        if self.opaque or self.unmatched or self.aa == 0 or self.bb == 0:
            return None
        return max(-1.0, min(1.0, self.ab / math.sqrt(self.aa) / math.sqrt(self.bb)))

    def as_dict(self) -> dict[str, Any]:
        """Return what is reported, for JSON."""
        names = ("slots", "differing", "nan_a", "nan_b", "inf_a", "inf_b", "unmatched", "signed_zeros")
        max_abs = self.max_abs if math.isfinite(self.max_abs) else None
        distances = {"relFro": self.relfro, "undefined": self.undefined, "max_abs": max_abs, "max_ulp": self.max_ulp}
        return {name: getattr(self, name) for name in names} | distances | {"cosine": self.cosine}


def counted(n: int, what: str) -> str:
    """Return "1 slot", "3 slots"."""
    return f"{n} {what}{'s' if n != 1 else ''}"


def if_identical(dtype: str, a: np.ndarray, b: np.ndarray) -> Numbers | None:
    """Return the counts of two tensors given as uint8 arrays if all bytes are equal, else None.

    The sums are left out, which makes it as fast as memory allows; `measure` gives them.
    """
    if a.size != b.size:
        return None
    kind = layout(dtype)
    if kind is None:
        return Numbers(slots=a.size) if np.array_equal(a, b) else None
    x, y = a.view(kind.code), b.view(kind.code)
    result = Numbers()
    for part in _threads().map(lambda at: _alike(kind, x[at : at + TASK], y[at : at + TASK]), range(0, x.size, TASK)):
        if part is None:
            return None
        result += part
    return result


def _words(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.uint64) if codes.nbytes % 8 == 0 else codes


# Signalling NaNs raise a flag when they are widened, and a - b may overflow before it is scaled: neither is an error.
_quiet = np.errstate(invalid="ignore", over="ignore")


@_quiet
def _alike(kind: Layout, x: np.ndarray, y: np.ndarray) -> Numbers | None:
    finite = True
    for at in range(0, x.size, SCAN):
        codes = x[at : at + SCAN]
        if not np.array_equal(_words(codes), _words(y[at : at + SCAN])):
            return None
        finite = finite and kind.finite(codes) is None
    if finite:
        return Numbers(slots=x.size)
    values = kind.values(x)
    return Numbers(slots=x.size, **_special(values, values))


def measure(a_dtype: str, a: np.ndarray, b_dtype: str, b: np.ndarray) -> Numbers:
    """Return the numbers of two tensors with equally many elements, given as uint8 arrays of their bytes.

    Tensors of two dtypes are compared by value, and every slot counts as differing whose values are not equal (NaN and
    NaN are); `max_ulp` is then 0. Opaque dtypes are compared byte by byte.
    """
    one, two = layout(a_dtype), layout(b_dtype)
    if one is None or two is None:
        if a is b:
            return Numbers(slots=a.size)
        differing = int(np.count_nonzero(a != b)) if a.size == b.size else max(a.size, b.size)
        return Numbers(slots=a.size, differing=differing, opaque=differing)
    x, y = a.view(one.code), b.view(two.code)
    kernel: _Kernel = _same_type if a_dtype == b_dtype else _two_types
    return total(_blocks(kernel, one, two, x, y))


def total(parts: Iterable[Numbers]) -> Numbers:
    """Return the numbers of the whole, added up in order."""
    result = Numbers()
    for part in parts:
        result += part
    return result


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compare")


def _blocks(kernel: _Kernel, one: Layout, two: Layout, x: np.ndarray, y: np.ndarray) -> Iterable[Numbers]:
    for at in range(0, x.size, BLOCK):
        yield kernel(one, two, x[at : at + BLOCK], y[at : at + BLOCK])


@_quiet
def _same_type(one: Layout, _: Layout, x: np.ndarray, y: np.ndarray) -> Numbers:
    a = one.values(x)
    differing = int(np.count_nonzero(x != y))
    if not differing:
        finite = one.finite(x)
        counts = {} if finite is None else _special(a, a)
        if finite is not None:
            a = np.where(finite, a, 0.0)
        return _sums(a, a, None, counts)
    b = one.values(y)
    counts = {"differing": differing}
    if one.exact:
        # Subtracted as unsigned integers: exact where float64 is not.
        unsigned = f"u{x.itemsize}"
        d = (np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)).astype(np.float64)
        return _sums(a, b, d, counts)
    if one.signed and (found := _ordinary(x, y, a, b, differing)):
        return found
    p, q = one.ordered(x), one.ordered(y)
    a, b, both = _finite_parts(one.finite(x), one.finite(y), a, b, counts)
    if both is not None:
        p, q = p[both], q[both]
    if p.size:
        # As unsigned integers: the gap between two signed ones can be twice their range.
        unsigned = f"u{p.itemsize}"
        gap = np.maximum(p, q).view(unsigned) - np.minimum(p, q).view(unsigned)
        counts["max_ulp"] = int(gap.max())
    if np.count_nonzero(p) < p.size:
        zeros = np.count_nonzero((a == 0) & (b == 0) & (x != y) & (True if both is None else both))
        counts["signed_zeros"] = int(zeros)
    return _sums(a, b, a - b, counts)


def _ordinary(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, differing: int) -> Numbers | None:
    """Return the numbers of a block without a change of sign, what is not finite, and extremes; None if it has any.

    Nearly every block of two equal trainings is one, and half the work is not needed then: the codes of two values of
    one sign subtract to their distance, and two sums of squares show what would overflow or vanish.
    """
    if (x ^ y).min() < 0:
        return None
    aa, bb = _dot(a, a), _dot(b, b)
    if not (1e-250 < aa < 1e250 and 1e-250 < bb < 1e250):
        return None
    gap, d = x - y, a - b
    return Numbers(
        slots=a.size, differing=differing, max_abs=max(float(d.max()), -float(d.min())),
        max_ulp=max(int(gap.max()), -int(gap.min())), aa=aa, bb=bb, ab=_dot(a, b), dd=_dot(d, d),
    )  # fmt: skip


@_quiet
def _two_types(one: Layout, two: Layout, x: np.ndarray, y: np.ndarray) -> Numbers:
    a, b = one.values(x), two.values(y)
    # Two integers as they are: float64 does not hold all of 64 bits. (In numpy, int64 and uint64 compare exactly.)
    same = (x == y) if one.exact and two.exact else (a == b) | (np.isnan(a) & np.isnan(b))
    counts = {"differing": int(a.size - np.count_nonzero(same))}
    a, b, _ = _finite_parts(one.finite(x), two.finite(y), a, b, counts)
    return _sums(a, b, a - b, counts)


def _finite_parts(
    fx: np.ndarray | None, fy: np.ndarray | None, a: np.ndarray, b: np.ndarray, counts: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return a and b with 0 where either is not finite, and the mask of the slots where both are (None: all)."""
    if fx is None and fy is None:
        return a, b, None
    both = np.ones(a.shape, bool) & (True if fx is None else fx) & (True if fy is None else fy)
    counts |= _special(a, b)
    return np.where(both, a, 0.0), np.where(both, b, 0.0), both


def _special(a: np.ndarray, b: np.ndarray) -> dict[str, int]:
    """Count what is not finite in two float64 arrays."""
    nan_a, nan_b, inf_a, inf_b = np.isnan(a), np.isnan(b), np.isinf(a), np.isinf(b)
    matched = (nan_a & nan_b) | (inf_a & inf_b & (a == b))
    unmatched = (nan_a | nan_b | inf_a | inf_b) & ~matched
    found = {"nan_a": nan_a, "nan_b": nan_b, "inf_a": inf_a, "inf_b": inf_b, "unmatched": unmatched}
    return {name: int(np.count_nonzero(mask)) for name, mask in found.items()}


def _sums(a: np.ndarray, b: np.ndarray, d: np.ndarray | None, counts: dict[str, Any]) -> Numbers:
    """Return the sums of a block of finite slots; no `d` means that a is b."""
    largest = max(_largest(v) for v in ((a,) if d is None else (a, b)))
    max_abs = 0.0 if d is None else _largest(d)
    exponent = 0
    if largest and not 1e-140 < largest < 1e140:
        exponent = math.frexp(largest)[1]
        a, b = np.ldexp(a, -exponent), np.ldexp(b, -exponent)
        d = None if d is None else a - b
    aa = _dot(a, a)
    if d is None:
        return Numbers(slots=a.size, aa=aa, bb=aa, ab=aa, exponent=exponent, **counts)
    return Numbers(slots=a.size, aa=aa, bb=_dot(b, b), ab=_dot(a, b), dd=_dot(d, d), exponent=exponent,
                   max_abs=max_abs, **counts)  # fmt: skip


def _largest(a: np.ndarray) -> float:
    return float(np.abs(a).max(initial=0.0))


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    # Not np.dot: a BLAS may split the sum by the number of its threads.
    return float(np.einsum("i,i->", a, b))
