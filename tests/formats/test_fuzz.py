"""Fuzzing: whatever is done to a file, a reader refuses it with a FormatError or reads what it says, nothing else.

Also bounded: each file is under 10 kB, and none may take long or make a large tensor out of it.
"""

import struct
import tracemalloc

import numpy as np
import pytest
import torch_writer as tw
import writers
from damage import outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import SAMPLES

from mlxdet.formats import open_checkpoint

BUDGET = settings(
    max_examples=80, deadline=2000, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Numbers that are wrong in interesting ways, as the fields of binary headers.
NUMBERS = [
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    65535,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Lower the limits, so that what must stay bounded is seen to be on a small file."""
    for module in ("archive", "torch_storages"):
        monkeypatch.setattr(f"mlxdet.formats.{module}.MAX_EXPANDED", 1 << 20)
    monkeypatch.setattr("mlxdet.formats.torch_objects.MAX_VALUES", 20_000)


@st.composite
def damaged(draw, data):
    """Return `data` after a few edits: bytes changed, cut, put in, repeated, moved, or fields set to bad numbers."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        length = draw(st.integers(1, 40))
        kind = draw(st.sampled_from(["byte", "cut", "insert", "repeat", "number", "swap", "ascii"]))
        if kind == "byte":
            changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "cut":
            del changed[at : at + length]
        elif kind == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "repeat":
            changed[at:at] = changed[at : at + length]
        elif kind == "number":
            code = draw(st.sampled_from(["<H", "<I", "<Q", ">I", ">Q"]))
            number = draw(st.sampled_from(NUMBERS)) & (1 << 8 * struct.calcsize(code)) - 1
            changed[at : at + struct.calcsize(code)] = struct.pack(code, number)
        elif kind == "swap":
            other = draw(st.integers(0, max(0, len(changed) - 1)))
            first, second = changed[at : at + length], changed[other : other + length]
            if abs(at - other) >= length:
                changed[at : at + length], changed[other : other + length] = second, first
        else:
            changed[at : at + 1] = draw(st.sampled_from([b"-", b"9", b"{", b"[", b'"', b"0", b",", b"e", b"9" * 30]))
    return bytes(changed)


@pytest.mark.parametrize("kind", SAMPLES)
def test_damaged_files(kind, tmp_path):
    path = tmp_path / "m"
    sample = SAMPLES[kind]

    @BUDGET
    @given(damaged(sample.data[: sample.header]))
    def check(header):
        path.write_bytes(header + sample.data[sample.header :])
        got = outcome(path)
        # What is accepted is consistent with itself, and no larger than the limits allow.
        for dtype, shape, raw in (got or {}).values():
            assert isinstance(dtype, str) and all(isinstance(size, int) and size >= 0 for size in shape)
            assert len(raw) <= 1 << 20

    check()


@pytest.mark.parametrize("kind", [kind for kind in SAMPLES if SAMPLES[kind].oracle])
def test_what_is_accepted_means_the_same_to_another_reader(kind, tmp_path):
    path = tmp_path / "m"
    sample = SAMPLES[kind]

    @BUDGET
    @given(st.data())
    def check(data):
        # One byte of the header: little enough to be accepted now and then.
        at = data.draw(st.integers(0, sample.header - 1))
        value = data.draw(st.integers(0, 255))
        changed = sample.data[:at] + bytes([value]) + sample.data[at + 1 :]
        path.write_bytes(changed)
        got = outcome(path)
        assert got is None or got == sample.oracle(path if kind.startswith("gguf") else changed)

    check()


STARTS = [b"", b"GGUF\3\0\0\0", b"TGPT\2\0\0\0", b"\x93NUMPY\1\0", b"NRUB\1\0", b"\x20\0\0\0\0\0\0\0{", b"PK\3\4",
          b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b'{"weight_map": ', b"\x80\x02"]  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_random_bytes(start, tmp_path):
    path = tmp_path / "m"

    @BUDGET
    @given(st.binary(max_size=300))
    def check(rest):
        path.write_bytes(start + rest)
        assert outcome(path) in (None, {})

    check()


STEPS = [
    b"(", b"0", b"1", b"2", b"N", b"\x88", b"K\x05", b"J\xff\xff\xff\xff", b"\x8a\x01\x05", b"U\x01a", b"X\x01\0\0\0w",
    b"]", b"a", b"e", b"l", b")", b"t", b"\x85", b"\x86", b"\x87", b"}", b"d", b"s", b"u", b"q\x00", b"h\x00", b"q\x01",
    b"h\x01", b"R", b"b", b"o", b"Q", b"\x81", b"\x8f", b"\x90", b"\x91", b"G" + bytes(8), b"cos\nsystem\n",
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n",
    b"ccollections\nOrderedDict\n", b"X\x07\0\0\0storage", b"ctorch\nSize\n",
]  # fmt: skip
PICKLE = st.lists(st.sampled_from(STEPS), max_size=60)


def test_random_programs_of_pickle(tmp_path):
    path = tmp_path / "m"

    @settings(BUDGET, max_examples=300)
    @given(PICKLE)
    def check(steps):
        pkl = b"\x80\x02" + b"".join(steps) + b"."
        path.write_bytes(tw.torch_zip(None, tw.Store(), pkl=pkl))
        assert outcome(path) in (None, {})
        system = tw.dumps({})
        legacy = b"".join(map(tw.dumps, (tw.MAGIC, 1001))) + system + pkl + tw.dumps([])
        path.write_bytes(legacy)
        assert outcome(path) in (None, {})

    check()


def lies():
    """Return small files that state enormous sizes."""
    huge = 1 << 60
    store = tw.Store()
    flat, kind = store.storage(np.zeros(4, np.float32)), tw.Global("torch", "FloatStorage")
    packed = writers.archive({"w.npy": writers.npy(np.zeros(1 << 21, np.float32))}, compress=True)
    array = writers.gguf([("a", (8,), 24, bytes(8))], [("k", ("array", "u8"), [1, 2, 3])])
    at = array.index(b"k") + 9
    return {
        "pickle: bytes": tw.torch_zip(None, tw.Store(), pkl=b"\x80\x05\x96" + struct.pack("<Q", huge) + b"x."),
        "pickle: integer": tw.torch_zip(None, tw.Store(), pkl=b"\x80\x02\x8b\xff\xff\xff\x7fx."),
        "torch: one number repeated": tw.torch_zip({"w": tw.window(flat, 0, (1 << 15, 1 << 15), (0, 0))}, store),
        "torch: storage": tw.torch_zip({"w": tw.Reference(("storage", kind, "0", "cpu", huge))}, store),
        "cbor: list": b"NRUB\1\0\x0a\0\0\0\x9b" + huge.to_bytes(8, "big") + b"\1",
        "gguf: array": array[:at] + struct.pack("<Q", huge) + array[at + 8 :],
        "gguf: tensors": writers.gguf(counts=(huge, huge)),
        "safetensors: header": struct.pack("<Q", 99_999_999) + b"{" + bytes(100),
        "npz: packed zeros": packed,
        "tinygpt: header": b"TGPT" + struct.pack("<II", 2, 1 << 31),
    }  # fmt: skip


@pytest.mark.parametrize("kind", lies())
def test_stated_sizes_cost_no_memory(kind, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(lies()[kind])
    tracemalloc.start()
    try:
        assert outcome(path) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_checkpoint_is_not_touched_by_reading_it(tmp_path):
    for kind, sample in SAMPLES.items():
        path = tmp_path / kind
        path.write_bytes(sample.data)
        open_checkpoint(path).verify()
        assert path.read_bytes() == sample.data
