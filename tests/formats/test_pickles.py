"""Pickles as data: equal to what Python's own pickle means for plain values, and inert for everything else."""

import collections
import datetime
import os
import pickle
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdet.formats import FormatError
from mlxdet.formats.pickles import Call, Global, load
from mlxdet.formats.source import Source


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("pickle") / "m.pt"
    path.write_bytes(b"x")
    return Source(path)


def value(source, data):
    pickled = load(source, memoryview(data), 0, "its pickle")
    assert pickled.stop == len(data)
    return pickled.value


KEYS = st.text(max_size=5) | st.integers(-(2**63), 2**63) | st.none() | st.booleans() | st.binary(max_size=4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_mean_what_python_says(source, protocol):
    @given(VALUES)
    def check(plain):
        if protocol == 2:
            plain = pickle.loads(pickle.dumps(plain, 4))
        got = value(source, pickle.dumps(plain, protocol))
        if protocol > 2 or not _bytes_in(plain):
            assert got == plain and repr(got) == repr(plain)

    check()


def _bytes_in(plain):
    """Protocol 2 has no bytes: Python writes a call of _codecs.encode, which we only record."""
    if isinstance(plain, dict):
        return any(_bytes_in(key) or _bytes_in(part) for key, part in plain.items())
    return isinstance(plain, bytes) or (isinstance(plain, list | tuple) and any(map(_bytes_in, plain)))


def test_shared_and_circular_values(source):
    shared = [1]
    got = value(source, pickle.dumps({"a": shared, "b": shared}, 2))
    assert got["a"] is got["b"] == [1]
    shared.append(shared)
    got = value(source, pickle.dumps(shared, 2))
    assert got[1] is got


class Plain:
    def __init__(self):
        self.x = 1


class Fruit(str):
    pass


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_become_records(source, protocol):
    got = value(source, pickle.dumps(collections.OrderedDict(a=1), protocol))
    assert isinstance(got, Call) and got.function == Global("collections", "OrderedDict") and got.items == [("a", 1)]
    got = value(source, pickle.dumps(Plain(), protocol))
    assert isinstance(got, Call) and got.state == {"x": 1}
    got = value(source, pickle.dumps({3, 4}, protocol))
    assert isinstance(got, Call) and got.function.name == "set"
    assert sorted(got.appended or got.args[0]) == [3, 4]
    got = value(source, pickle.dumps(datetime.date(2026, 1, 2), protocol))
    assert isinstance(got, Call) and got.function == Global("datetime", "date")
    assert isinstance(value(source, pickle.dumps(Fruit("x"), protocol)), Call)


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_payload_does_not_run(source, tmp_path):
    mark = tmp_path / "ran"
    data = pickle.dumps({"x": Evil(os.system, f"touch {mark}")}, 2)
    got = value(source, data)["x"]
    assert not mark.exists()
    assert isinstance(got, Call) and got.function == Global(os.system.__module__, "system")
    pickle.loads(data)  # the payload is live: Python itself runs it
    assert mark.exists()


def test_nothing_named_is_imported(source):
    data = b"\x80\x02cantigravity\nfly\n)R."
    assert value(source, data).function == Global("antigravity", "fly")
    assert "antigravity" not in sys.modules


PROTO = b"\x80\x02"
BAD = {
    "empty": b"",
    "only a stop": PROTO + b".",
    "two values": PROTO + b"K\x01K\x02.",
    "a mark left": PROTO + b"(K\x01.",
    "mark never set": PROTO + b"e.",
    "pop of nothing": PROTO + b"0.",
    "unset memo": PROTO + b"h\x07.",
    "extension registry": PROTO + b"\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "protocol 0": b"I1\n.",
    "protocol 9": b"\x80\x09K\x01.",
    "text persistent id": PROTO + b"Pabc\n.",
    "unknown opcode": PROTO + b"\xff.",
    "name without an end": PROTO + b"c" + b"a" * 2000,
    "name that is not UTF-8": PROTO + b"c\xff\nb\n.",
    "text that is not UTF-8": PROTO + b"X\x01\0\0\0\xff.",
    "string longer than the file": PROTO + b"X\xff\xff\xff\x7f.",
    "bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
    "integer of 2**31 bytes": PROTO + b"\x8b\xff\xff\xff\x7f.",
    "item of a number": PROTO + b"K\x01K\x02K\x03s.",
    "append to a number": PROTO + b"K\x01K\x02a.",
    "odd items": PROTO + b"}(K\x01u.",
    "list as key": PROTO + b"}]K\x01s.",
    "huge key": PROTO + b"}\x8a\x10" + b"\x7f" * 16 + b"K\x01s.",
    "key set twice": PROTO + b"}(U\x01aK\x01U\x01aK\x02u.",
    "state of a number": PROTO + b"K\x01}b.",
    "state twice": PROTO + b"ca\nb\n)R}b}b.",
    "arguments that are no tuple": PROTO + b"ca\nb\nK\x01R.",
    "object of nothing": PROTO + b"(o.",
    "global of numbers": b"\x80\x04K\x01K\x02\x93.",
}


@pytest.mark.parametrize("kind", BAD)
def test_refused(source, kind):
    with pytest.raises(FormatError, match=r"m\.pt: its pickle .*at byte"):
        value(source, BAD[kind])


def test_truncation_is_refused(source):
    data = pickle.dumps({"a": [1, 2.5, "text", (None, True)], "b": Plain()}, 2)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            load(source, memoryview(data[:length]), 0, "its pickle")


def test_deep_pickles_cost_no_stack(source):
    depth = 200_000
    got = value(source, PROTO + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(1000):
        got = got[0]
    deep = value(source, PROTO + b")" + b"\x85" * depth + b".")
    assert isinstance(deep, tuple)
    with pytest.raises(FormatError, match="key"):  # hashing a deep tuple would overflow the stack
        value(source, PROTO + b"})" + b"\x85" * depth + b"K\x01s.")


def test_limits_of_size_and_steps(source, monkeypatch):
    monkeypatch.setattr("mlxdet.formats.pickles.MAX_OPCODES", 1000)
    with pytest.raises(FormatError, match="1000 steps"):
        value(source, PROTO + b"}" * 2000 + b".")
    monkeypatch.setattr("mlxdet.formats.pickles.MAX_BYTES", 100)
    with pytest.raises(FormatError, match="longer than 100 bytes"):
        value(source, pickle.dumps("x" * 200, 2))
