"""Every number of a comparison against exact arithmetic on Python's own fractions, on all kinds of tensors."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mlxdet.formats import from_numpy
from mlxdet.formats.tensor import NUMPY
from mlxdet.measure import numbers
from mlxdet.measure.numbers import if_identical, measure

EXTRA = {
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
FLOATS = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]
INTEGERS = ["I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"]


def numpy_dtype(dtype):
    return np.dtype(EXTRA.get(dtype) or NUMPY[dtype])


def tensor(dtype, values):
    """Return (bytes as uint8, exact Python values) of an array of `dtype` (a list of numbers, or raw codes)."""
    array = values if isinstance(values, np.ndarray) else np.array(values, numpy_dtype(dtype))
    data = np.frombuffer(array.tobytes(), np.uint8)
    plain = array.view(numpy_dtype(dtype))
    exact = [int(v) for v in plain] if dtype in INTEGERS else [float(v) for v in plain]
    return data, exact


def expected(x, y, bits_x, bits_y):
    """Return the numbers of two lists of exact values, by definition."""
    pairs = list(zip(x, y, strict=True))
    finite = [(Fraction(a), Fraction(b)) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    unmatched = sum(
        not (a == b or (a != a and b != b)) for a, b in pairs if not (math.isfinite(a) and math.isfinite(b))
    )
    aa, bb, ab, dd = (sum((f(a, b) for a, b in finite), Fraction()) for f in (
        lambda a, b: a * a, lambda a, b: b * b, lambda a, b: a * b, lambda a, b: (a - b) ** 2))  # fmt: skip
    differing = sum(p != q for p, q in zip(bits_x, bits_y, strict=True))
    relfro = root(dd / aa) if differing and aa and not unmatched else None if differing else 0.0
    if unmatched or aa == 0 or bb == 0:
        cosine = 1.0 if not differing and pairs else None
    else:
        cosine = root(ab * ab / (aa * bb)) * (1 if ab >= 0 else -1)
    return {
        "slots": len(pairs), "differing": differing, "unmatched": unmatched,
        "nan_a": sum(a != a for a in x), "nan_b": sum(b != b for b in y),
        "inf_a": sum(math.isinf(a) for a in x), "inf_b": sum(math.isinf(b) for b in y),
        "relFro": relfro, "cosine": cosine, "max_abs": as_float(max((abs(a - b) for a, b in finite), default=0)),
    }  # fmt: skip


def as_float(value):
    """Return a fraction as a float, or None where no float is that large."""
    try:
        return float(value)
    except OverflowError:
        return None


def root(value):
    """Return the square root of a fraction as a float, without overflow."""
    shift = (value.denominator.bit_length() - value.numerator.bit_length()) // 2
    return math.ldexp(math.sqrt(value * Fraction(4) ** shift), -shift)


def check(dtype, p, q):
    """Measure two arrays of raw codes or lists and hold them against the definition."""
    (a, x), (b, y) = tensor(dtype, p), tensor(dtype, q)
    width = numpy_dtype(dtype).itemsize
    bits_x, bits_y = ([bytes(d[i : i + width]) for i in range(0, d.size, width)] for d in (a, b))
    want = expected(x, y, bits_x, bits_y)
    found = measure(dtype, a, dtype, b)
    got = found.as_dict()
    for name, value in want.items():
        if isinstance(value, float):
            assert got[name] == pytest.approx(value, rel=1e-12, abs=1e-300), name
        else:
            assert got[name] == value, name
    same = if_identical(dtype, a, b)
    assert (same is not None) == (want["differing"] == 0)
    if same is not None:
        assert {k: same.as_dict()[k] for k in ("slots", "nan_a", "inf_a")} == {
            k: want[k] for k in ("slots", "nan_a", "inf_a")
        }
    return found


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_random_codes_of_every_dtype(dtype):
    # Random bits hold every kind of value: denormal, huge, NaN of any payload, infinite, both zeros.
    rng = np.random.default_rng(1)
    width = numpy_dtype(dtype).itemsize
    for n in (7, 400):
        p, q = (rng.integers(0, 256, n * width, np.uint8).view(f"u{width}") for _ in range(2))
        if dtype == "BOOL":
            p, q = p % 2, q % 2
        check(dtype, p, q)
        check(dtype, p, p)
        q = p.copy()
        q[n // 2] ^= 1
        check(dtype, p, q)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_random_values(dtype):
    rng = np.random.default_rng(2)
    p = rng.standard_normal(3000).astype(numpy_dtype(dtype))
    q = (p.astype(np.float64) + 1e-2 * rng.standard_normal(3000)).astype(numpy_dtype(dtype))
    assert 0.005 < check(dtype, p, q).relfro < 0.02


@pytest.mark.parametrize(
    ("dtype", "p", "q"),
    [
        ("F32", [1e30, -3e30, 2e38], [1e30, -3.0001e30, 2e38]),
        ("F64", [1e200, 1e-200, 3.0], [1.5e200, 2e-200, 3.0]),
        ("F64", [1.7e308, -1.7e308], [1.6e308, 1.7e308]),
        ("F64", [5e-324, 1e-310, 0.0], [1e-323, 1e-310, -0.0]),
        ("F64", [1e-200, 3e-190], [2e-200, 3e-190]),
        ("F32", [1e-45, 3e-40], [3e-45, 3e-40]),
        ("F32", [math.nan, 1.0, 2.0], [math.nan, 1.0, 2.5]),
        ("F32", [math.nan, 1.0], [0.5, 1.0]),
        ("F32", [1.0, 1.0], [math.nan, 1.0]),
        ("F32", [math.inf, 1.0], [math.inf, 2.0]),
        ("F32", [math.inf, 1.0], [-math.inf, 1.0]),
        ("F32", [math.inf, 1.0], [math.nan, 1.0]),
        ("F32", [0.0, -0.0, 1.0], [-0.0, 0.0, 1.0]),
        ("F32", [0.0, 0.0], [0.0, 1e-3]),
        ("F32", [0.0, 0.0], [0.0, -0.0]),
        ("F32", [1e-3, 0.0], [0.0, 0.0]),
        ("F32", [], []),
        ("I64", [2**60, -(2**63), 5], [2**60 + 1, 2**63 - 1, 5]),
        ("U64", [2**64 - 1, 0], [0, 2**64 - 1]),
        ("I8", [-128, 127], [127, -128]),
        ("BOOL", [True, False], [False, False]),
        ("F16", [65504.0, 6e-8], [65504.0, 1.2e-7]),
    ],
)  # fmt: skip
def test_extreme_values(dtype, p, q):
    check(dtype, p, q)


def test_a_reference_too_small_for_a_ratio_is_taken_as_zero():
    a, b = tensor("F64", [1e-310])[0], tensor("F64", [1e300])[0]
    assert measure("F64", a, "F64", b).undefined == "the reference is zero"


def test_a_difference_too_large_for_float64_is_left_out_of_json():
    a, b = tensor("F64", [1.7e308])[0], tensor("F64", [-1.7e308])[0]
    found = measure("F64", a, "F64", b)
    assert found.max_abs == math.inf
    assert found.as_dict()["max_abs"] is None
    assert found.relfro == 2.0


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E5M2FNUZ"])
@pytest.mark.parametrize("start", [1.0, -1.5, 0.0, -0.0])
def test_max_ulp_counts_the_values_between(dtype, start):
    kind = numpy_dtype(dtype)
    value = kind.type(start)
    for steps in range(1, 6):
        value = np.nextafter(value, kind.type(100.0)) if kind.itemsize > 1 else _up(kind, value)
        a, b = (np.frombuffer(np.array([v], kind).tobytes(), np.uint8) for v in (start, value))
        assert measure(dtype, a, dtype, b).max_ulp == steps


def _up(kind, value):
    """Return the next larger value of an 8-bit dtype, by looking at all of them."""
    every = np.arange(256, dtype=np.uint8).view(kind)
    return kind.type(min(float(v) for v in every if float(v) > float(value)))


def test_max_ulp_across_zero_and_the_whole_range():
    a, b = tensor("F32", [1e-45, -1e-45, -0.0])[0], tensor("F32", [-1e-45, -1e-45, 0.0])[0]
    assert measure("F32", a, "F32", b).max_ulp == 2
    assert measure("F32", a, "F32", b).signed_zeros == 1
    largest = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
    a, b = tensor("F32", [largest])[0], tensor("F32", [-largest])[0]
    assert measure("F32", a, "F32", b).max_ulp == 2 * 0x7F7FFFFF


@pytest.mark.parametrize(
    ("one", "two"), [("F32", "BF16"), ("F32", "F64"), ("BF16", "F16"), ("I32", "F32"), ("F8_E4M3", "F32")]
)
def test_two_dtypes_compare_by_value(one, two):
    rng = np.random.default_rng(3)
    values = (8 * rng.standard_normal(500)).astype(np.float32)
    (a, x), (b, y) = (tensor(d, values.astype(numpy_dtype(d))) for d in (one, two))
    found = measure(one, a, two, b)
    want = expected(x, y, x, y)
    assert found.differing == sum(p != q for p, q in zip(x, y, strict=True))
    assert found.relfro == pytest.approx(want["relFro"], rel=1e-12)
    assert found.max_abs == want["max_abs"]


def test_integers_of_two_dtypes_are_compared_as_they_are():
    a, b = np.array([2**63 - 1, 5], "<i8"), np.array([2**63, 5], "<u8")  # one value in float64
    assert measure("I64", a.view("u1"), "U64", b.view("u1")).differing == 1
    assert measure("I64", a.view("u1"), "U64", a.view("u1")).differing == 0


def test_opaque_bytes_have_no_distance():
    a = np.arange(36, dtype=np.uint8)
    b = a.copy()
    assert if_identical("Q4_0", a, b).slots == 36
    b[3] ^= 16
    assert if_identical("Q4_0", a, b) is None
    found = measure("Q4_0", a, "Q4_0", b)
    assert (found.differing, found.relfro) == (1, None)
    assert found.undefined == "1 differing byte of a dtype without numeric form"


def test_complex_numbers_are_two_slots_each():
    p, q = np.array([1 + 2j, 3 - 1j], np.complex64), np.array([1 + 2j, 3 + 1j], np.complex64)
    found = measure("C64", from_numpy(p).data, "C64", from_numpy(q).data)
    assert (found.slots, found.differing) == (4, 1)
    assert found.relfro == pytest.approx(np.linalg.norm(p - q) / np.linalg.norm(p), rel=1e-12)


def test_parts_add_up_to_the_whole_across_scales():
    rng = np.random.default_rng(4)
    p = rng.standard_normal(300) * 10.0 ** rng.integers(-300, 300, 300)
    q = p * (1 + 1e-3 * rng.standard_normal(300))
    a, b = from_numpy(p).data, from_numpy(q).data
    whole = measure("F64", a, "F64", b)
    parts = [measure("F64", a[i : i + 80], "F64", b[i : i + 80]) for i in range(0, a.size, 80)]
    summed = numbers.total(parts)
    assert summed.relfro == pytest.approx(whole.relfro, rel=1e-12)
    x, y = [float(v) for v in p], [float(v) for v in q]
    assert whole.relfro == pytest.approx(expected(x, y, x, y)["relFro"], rel=1e-12)


def test_threads_do_not_reach_a_bit(monkeypatch):
    rng = np.random.default_rng(5)
    p = rng.standard_normal(3 * numbers.TASK + 17, dtype=np.float32)
    q = p + np.float32(1e-4) * rng.standard_normal(p.size, dtype=np.float32)
    a, b = from_numpy(p).data, from_numpy(q).data
    first, same = measure("F32", a, "F32", b), if_identical("F32", a, a.copy())
    one_thread = numbers.ThreadPoolExecutor(1)
    monkeypatch.setattr(numbers, "_threads", lambda: one_thread)
    assert measure("F32", a, "F32", b) == first
    assert if_identical("F32", a, a.copy()) == same
    assert first.relfro == pytest.approx(
        np.linalg.norm(p.astype(np.float64) - q) / np.linalg.norm(p.astype(np.float64)), rel=1e-10
    )


def test_one_flipped_bit_anywhere_is_seen():
    rng = np.random.default_rng(6)
    a = rng.integers(0, 256, 4 * (numbers.SCAN + 5), np.uint8)
    for at in (0, 1, 4 * numbers.BLOCK - 1, 4 * numbers.BLOCK, 4 * numbers.SCAN - 1, 4 * numbers.SCAN, a.size - 1):
        b = a.copy()
        b[at] ^= 0x80
        assert if_identical("F32", a, b) is None
        assert measure("F32", a, "F32", b).differing == 1
