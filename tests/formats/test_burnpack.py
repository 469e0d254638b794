"""burnpack: its two layouts, several records, optimizer names; and the wrong base that cannot be read from."""

import os
import random
import struct

import cbor2
import numpy as np
import pytest
import writers
from damage import content, refused_when_cut
from hypothesis import given
from hypothesis import strategies as st

from mlxdet.formats import FormatError, cbor, content_digest, open_checkpoint
from mlxdet.formats.source import Source

RNG = np.random.default_rng(23)
LAYOUTS = ["aligned", "packed"]


def model(ids=None, scale=1.0):
    """Return the tensors of a small model, in module order, which is not name order."""
    generator = np.random.default_rng(5)
    shapes = [("embedding.weight", (48, 64)), ("blocks.0.norm.gamma", (3,)), ("a.bias", (1,)), ("head.weight", (64, 7))]
    return [
        (name, "F32", shape, (generator.standard_normal(shape) * scale).astype("<f4").tobytes(), ids and ids[index])
        for index, (name, shape) in enumerate(shapes)
    ]


def expected(tensors, prefix=""):
    return {prefix + name: (dtype, shape, raw) for name, dtype, shape, raw, _ in tensors}


def opened(path, data):
    path.write_bytes(data)
    return open_checkpoint(path)


def refused(path, data, message):
    with pytest.raises(FormatError, match=message) as caught:
        opened(path, data)
    assert path.name in str(caught.value)


# The layouts.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_are_told_apart(tmp_path, layout):
    scalars = {"lr": {"Float": 1e-4}, "step": {"UInt": 7}, "neg": {"Int": -3}, "ok": {"Bool": True}}
    data = writers.burnpack(model([1 << 63, 2, 3, 4]), {"producer": "t"}, scalars, layout)
    checkpoint = opened(tmp_path / "m", data)
    assert content(checkpoint.tensors) == expected(model())
    ids = {"embedding.weight": 1 << 63, "blocks.0.norm.gamma": 2, "a.bias": 3, "head.weight": 4}
    assert checkpoint.metadata == {"producer": "t", "lr": 1e-4, "step": 7, "neg": -3, "ok": True, "param_id": ids}
    assert checkpoint.notes == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_that_fit_both_layouts_are_decided_by_the_exact_length(tmp_path, layout):
    tensors = [("a", "F32", (64,), RNG.bytes(256), None), ("b", "F32", (128,), RNG.bytes(512), None)]
    data = writers.burnpack(tensors, layout=layout)
    assert content(opened(tmp_path / "m", data).tensors) == expected(tensors)


def test_a_file_that_could_be_either_layout_is_refused(tmp_path):
    """Packed and starting with zeros, or aligned and cut short by exactly its padding: the same bytes."""
    tensors = [("a", "F32", (64,), bytes(256), None), ("b", "F32", (64,), RNG.bytes(256), None)]
    aligned, packed = (writers.burnpack(tensors, layout=layout) for layout in LAYOUTS)
    padding = len(aligned) - len(packed)
    assert 0 < padding < 256
    refused(tmp_path / "m", packed, f"either a burnpack record of Burn 0.19 .* lost its last {padding} bytes")
    assert content(opened(tmp_path / "m", aligned).tensors) == expected(tensors)
    refused(tmp_path / "m", aligned[:-padding], "either")
    # With other bytes in that place it can only be packed.
    tensors[0] = ("a", "F32", (64,), RNG.bytes(256), None)
    packed = writers.burnpack(tensors, layout="packed")
    assert content(opened(tmp_path / "m", packed).tensors) == expected(tensors)


def test_a_real_aligned_file_cut_by_its_padding_is_refused(tmp_path):
    """The trap found in a real file of 18 tensors: 128 bytes cut from its end fit the packed length perfectly."""
    tensors = [(f"conv{k}", "F32", (64,), RNG.bytes(256), 1 << 60 | k) for k in range(6)]
    data = writers.burnpack(tensors)
    refused_when_cut(tmp_path / "m", data)


def test_an_empty_record_is_256_bytes(tmp_path):
    data = writers.burnpack([])
    assert len(data) == 256 and dict(opened(tmp_path / "m", data).tensors) == {}
    refused(tmp_path / "m", writers.burnpack([], layout="packed"), "truncated")


# The mistake of the first seed.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_data_section_is_never_taken_from_the_wrong_base(tmp_path, layout):
    """Offsets read from the start of the record gave plausible numbers for 53 of 54 tensors, and a wrong table."""
    data = writers.burnpack(model(), layout=layout)
    got = opened(tmp_path / "m", data).tensors["embedding.weight"].to_numpy()
    right = np.frombuffer(model()[0][3], "<f4").reshape(48, 64)
    assert got.tobytes() == right.tobytes()
    wrong = np.frombuffer(data[: right.nbytes], "<f4")
    assert wrong.tobytes() != right.tobytes()
    # Bytes put between header and data would shift the base: each such file is refused, none is solved for.
    (length,) = struct.unpack("<I", data[6:10])
    start = 10 + length
    for extra in (4, 8, 64, 128, 256, 1408):
        refused(tmp_path / "m", data[:start] + bytes(extra) + data[start:], "truncated or extended|padding|either|gap")
        if layout == "aligned":  # of the same length; zeros in front of packed data would be just other data
            refused(tmp_path / "m", data[:start] + bytes(extra) + data[start:-extra], "padding")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [1, 4, 255, 256, 4096])
def test_truncation_and_extension(tmp_path, layout, cut):
    data = writers.burnpack(model(), layout=layout)
    refused(tmp_path / "m", data[:-cut], "truncated")
    refused(tmp_path / "m", data + bytes(cut), "truncated or extended")


def test_a_header_shifted_by_one_tensor_is_refused(tmp_path):
    def shift(root):
        names = list(root["tensors"])
        ranges = [root["tensors"][name]["data_offsets"] for name in names]
        for name, moved in zip(names, ranges[1:] + ranges[:1], strict=True):
            root["tensors"][name]["data_offsets"] = moved

    for layout in LAYOUTS:
        refused(tmp_path / "m", writers.burnpack(model(), layout=layout, edit=shift), "needs")


# What a record may not say.


def set_entry(**fields):
    def edit(root):
        root["tensors"]["a.bias"].update(fields)

    return edit


def set_root(**fields):
    return lambda root: root.update(fields)


BAD = {
    "overlap": (set_entry(data_offsets=[0, 4]), "inside tensor"),
    "gap": (set_entry(data_offsets=[1 << 20, (1 << 20) + 4]), "leaves a gap"),
    "offsets backwards": (set_entry(data_offsets=[4, 0]), "'a.bias': ends at 0"),
    "negative offset": (set_entry(data_offsets=[-4, 0]), "'a.bias': data_offsets"),
    "one offset": (set_entry(data_offsets=[0]), "data_offsets"),
    "wrong size": (set_entry(shape=[2]), "'a.bias': has 4 bytes, but F32 \\[2\\] needs 8"),
    "negative shape": (set_entry(shape=[-1]), "sizes"),
    "overflow": (set_entry(shape=[1 << 40, 1 << 40]), "overflows"),
    "shape of text": (set_entry(shape="1"), "sizes"),
    "unknown dtype": (set_entry(dtype="F33"), "'F33' is not known"),
    "unknown kind of bool": (set_entry(dtype={"Bool": "U16"}), "not known"),
    "our own name for a dtype": (set_entry(dtype="BOOL_U8"), "not known"),
    "unknown field": (set_entry(crc=1), "exactly"),
    "id of text": (set_entry(param_id="7"), "param_id"),
    "no tensors": (lambda root: root.pop("tensors"), "no table of tensors"),
    "unknown table": (set_root(extra={}), "no table of tensors"),
    "metadata of numbers": (set_root(metadata={"a": 1}), "table of strings"),
    "scalars without types": (set_root(scalars={"a": 1}), "typed values"),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(tmp_path, kind):
    edit, message = BAD[kind]
    refused(tmp_path / "m", writers.burnpack(model(), edit=edit), message)


def test_headers_that_lie(tmp_path):
    data = writers.burnpack(model())
    (length,) = struct.unpack("<I", data[6:10])
    for wrong in (length - 1, length + 1, length + 5, 0, 1 << 31):
        refused(tmp_path / "m", data[:6] + struct.pack("<I", wrong) + data[10:], "CBOR|truncated|no table")
    refused(tmp_path / "m", writers.burnpack(model(), version=2), "version 2")
    refused(tmp_path / "m", data[:8], "truncated")
    changed = bytearray(data)
    changed[10 + length] = 1
    refused(tmp_path / "m", bytes(changed), "padding")


def test_padding_between_tensors_must_be_zero(tmp_path):
    data = bytearray(writers.burnpack([("a", "U8", (3,), b"abc", None), ("b", "U8", (3,), b"def", None)]))
    data[-200] = 1
    refused(tmp_path / "m", bytes(data), "'b': the padding before it")


def test_dtypes(tmp_path):
    tensors = [("bf", "BF16", (2,), b"abcd"), ("half", "F16", (), b"ab"), ("old", "Bool", (2,), b"\1\0"),
               ("native", {"Bool": "Native"}, (1,), b"\1"), ("u8", {"Bool": "U8"}, (1,), b"\1"),
               ("u32", {"Bool": "U32"}, (1,), b"\1\0\0\0"), ("flex", "Flex32", (1,), b"abcd"),
               ("q", {"QFloat": {"value": "Q8S", "level": {"Block": 32}}}, (4,), b"abcdefgh"),
               ("empty", "F32", (0, 3), b"")]  # fmt: skip
    for layout in LAYOUTS:
        got = content(opened(tmp_path / "m", writers.burnpack([(*t, None) for t in tensors], layout=layout)).tensors)
        assert {name: dtype for name, (dtype, _, _) in got.items()} == {
            "bf": "BF16", "half": "F16", "old": "BOOL", "native": "BOOL", "u8": "BOOL_U8", "u32": "BOOL_U32",
            "flex": "Flex32", "q": 'QFloat {"level": {"Block": 32}, "value": "Q8S"}', "empty": "F32",
        }  # fmt: skip
        assert {name: raw for name, (_, _, raw) in got.items()} == {t[0]: t[3] for t in tensors}


# Ids, records, containers.


def test_parameter_ids_differ_in_every_process_and_the_content_does_not(tmp_path):
    digests, files = set(), set()
    for number in range(3):
        ids = [random.Random(os.urandom(8)).getrandbits(64) | 1 << 63 for _ in range(4)]
        data = writers.burnpack(model(ids))
        files.add(data)
        digests.add(content_digest(opened(tmp_path / str(number), data).tensors))
    assert len(files) == 3 and len(digests) == 1
    changed = opened(tmp_path / "m", writers.burnpack(model(scale=1 + 1e-6)))
    assert content_digest(changed.tensors) not in digests


def optimizer(ids, paths=True):
    """Return a record of an optimizer: its names start with parameter ids."""
    tensors = [
        (f"{number}.moment_1", "F32", (2,), struct.pack("<2f", index, 1), None) for index, number in enumerate(ids)
    ]
    metadata = {str(number): f"layer{index}.weight" for index, number in enumerate(ids)} if paths else {}
    scalars = {f"{number}.__rank": {"UInt": 1} for number in ids}
    return writers.burnpack(tensors, {**metadata, "kind": "adam"}, scalars)


def test_optimizer_records_get_the_paths_of_their_parameters(tmp_path):
    one, two = (opened(tmp_path / str(k), optimizer([k << 60 | 7, k << 61 | 9])) for k in (1, 2))
    assert set(one.tensors) == {"layer0.weight.moment_1", "layer1.weight.moment_1"}
    assert content(one.tensors) == content(two.tensors)
    assert one.metadata == two.metadata == {"kind": "adam", "layer0.weight.__rank": 1, "layer1.weight.__rank": 1}


def test_paths_come_from_the_model_in_the_same_file_if_the_record_has_none(tmp_path):
    ids = [1 << 60, 1 << 61]
    tensors = [(f"l{index}.w", "F32", (1,), b"abcd", number) for index, number in enumerate(ids)]
    checkpoint = opened(tmp_path / "m", writers.burnpack(tensors) + optimizer(ids, paths=False))
    assert set(checkpoint.tensors) == {"record0.l0.w", "record0.l1.w", "record1.l0.w.moment_1", "record1.l1.w.moment_1"}
    assert checkpoint.notes == ()
    alone = opened(tmp_path / "m", optimizer(ids, paths=False))
    assert "2" not in alone.tensors and alone.notes[0].startswith("4 names start with a parameter id")


def test_two_ids_with_one_path_are_refused(tmp_path):
    tensors = [("11.m", "U8", (1,), b"a", None), ("12.m", "U8", (1,), b"b", None)]
    refused(tmp_path / "m", writers.burnpack(tensors, {"11": "w", "12": "w"}), "same path")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("header", [True, False])
def test_several_records_in_the_container_of_a_trainer(tmp_path, layout, header):
    """As in the first seed's file: a header with the length of each section, two models, an empty optimizer."""
    records = [
        writers.burnpack(model(), layout=layout),
        writers.burnpack(model(scale=2), layout=layout),
        writers.burnpack([]),
    ]
    box = b"DORM" + struct.pack("<IQ3QQ", 1, 3, *map(len, records), 0) if header else b""
    checkpoint = opened(tmp_path / "m.bin", box + b"".join(records))
    assert content(checkpoint.tensors) == expected(model(), "record0.") | expected(model(scale=2), "record1.")
    whole = box + b"".join(records)
    for cut in (1, 4, 128, 255, 4096):
        refused(tmp_path / "m", whole[:-cut], "truncated|length")
        if len(records[0]) > cut:
            refused(
                tmp_path / "m", whole[: len(box) + 5000] + whole[len(box) + 5000 + cut :], "truncated|padding|either"
            )
    refused(tmp_path / "m", whole + b"\0", "truncated or extended")
    refused(tmp_path / "m", whole + b"NRUB", "truncated")


def test_a_preamble_must_state_the_lengths_of_the_records(tmp_path):
    record = writers.burnpack(model())
    right = b"MYTRAINER NRUB " + struct.pack("<I", len(record))
    assert content(opened(tmp_path / "m", right + record).tensors) == expected(model())
    for wrong in (b"x", b"MYTRAINER", struct.pack("<Q", len(record) + 1), right[:-1] + b"\x01"):
        refused(tmp_path / "m", wrong + record, "do not state the length")
    # One length for two records of it does not do either.
    refused(tmp_path / "m", right + record + record, "do not state the length")
    # And nothing as large as a record can hide before the first.
    refused(tmp_path / "m", bytes(300) + record, "not a checkpoint")


def test_a_damaged_first_record_is_not_passed_over(tmp_path):
    records = writers.burnpack(model()) + writers.burnpack(model(scale=2))
    refused(tmp_path / "m", b"X" + records[1:], "not a checkpoint")
    small = writers.burnpack([("a", "U8", (1,), b"x", None)], layout="packed")
    refused(tmp_path / "m", b"X" + small[1:] + writers.burnpack(model()), "do not state the length")


def test_too_many_records_are_refused(tmp_path):
    empty = writers.burnpack([])
    assert dict(opened(tmp_path / "m", empty * 200).tensors) == {}
    refused(tmp_path / "m", empty * 2000, "too many records")


# CBOR.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize("canonical", [False, True])
def test_cbor_means_what_cbor2_says(tmp_path, canonical):
    path = tmp_path / "m"

    @given(VALUES)
    def check(value):
        data = cbor2.dumps(value, canonical=canonical)  # canonical: the shortest lossless floats, as Burn writes them
        path.write_bytes(data)
        got = cbor.parse(Source(path), 0, len(data))
        assert got == value and repr(got) == repr(value) if not canonical else got == value

    check()


CBOR = {
    "indefinite list": (b"\x9f\x01\xff", "indefinite"),
    "tag": (b"\xc1\x01", "tag"),
    "reserved": (b"\x1c", "indefinite"),
    "simple value": (b"\xe0", "simple"),
    "key twice": (b"\xa2\x61a\x01\x61a\x02", "'a' twice"),
    "number as key": (b"\xa1\x01\x01", "no text"),
    "left over": (b"\x01\x01", "left over"),
    "truncated": (b"\x42a", "truncated"),
    "list of 2**60": (b"\x9b\x10\0\0\0\0\0\0\0\x01", "truncated"),
    "text of 2**60": (b"\x7b\x10\0\0\0\0\0\0\0a", "truncated"),
    "not UTF-8": (b"\x61\xff", "UTF-8"),
    "deep": (b"\x81" * 500 + b"\x01", "deeply"),
}


@pytest.mark.parametrize("kind", CBOR)
def test_cbor_that_is_refused(tmp_path, kind):
    data, message = CBOR[kind]
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(FormatError, match=f"m: has .*CBOR metadata.*{message}"):
        cbor.parse(Source(tmp_path / "m"), 0, len(data))
