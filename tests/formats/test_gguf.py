"""GGUF: against the gguf package both ways, MLX's files, big-endian files, and everything that is refused."""

import gguf
import mlx.core as mx
import numpy as np
import oracles
import pytest
import writers
from damage import content

from mlxdet.formats import FormatError, open_checkpoint
from mlxdet.formats.gguf import KINDS

RNG = np.random.default_rng(5)


def opened(path, data):
    path.write_bytes(data)
    return open_checkpoint(path)


def test_the_table_of_types_is_the_packages():
    ours = {number: (kind.name, kind.block, kind.nbytes) for number, kind in KINDS.items()}
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = ours.keys() & theirs.keys()  # either may know a newer type
    assert len(shared) >= 29 and all(ours[number] == theirs[number] for number in shared)


def test_we_read_what_the_package_writes(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "a name")
    writer.add_array("tokenizer.ggml.tokens", [f"token{n}" for n in range(1000)])
    writer.add_array("few", [1, 2, 3])
    writer.add_bool("yes", True)
    writer.add_float64("pi", 3.25)
    arrays = {"f32": RNG.standard_normal((3, 64)).astype(np.float32), "f16": RNG.standard_normal(7).astype(np.float16),
              "i8": np.arange(5, dtype=np.int8), "i64": np.arange(6).reshape(1, 2, 3)}  # fmt: skip
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    quantised = gguf.quants.quantize(arrays["f32"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    got = content(checkpoint.tensors)
    assert got == oracles.gguf_reader(path)
    for name, array in arrays.items():
        assert got[name][1:] == (array.shape, array.tobytes())
    assert got["q8"] == ("Q8_0", (3, 64), quantised.tobytes())
    metadata = checkpoint.metadata
    assert metadata["general.name"] == "a name" and metadata["few"] == [1, 2, 3]
    assert metadata["yes"] is True and metadata["pi"] == 3.25
    assert metadata["tokenizer.ggml.tokens"]["length"] == 1000


def test_we_read_what_mlx_writes(tmp_path):
    arrays = {"b": mx.ones((2, 5)), "a": mx.arange(3), "h": mx.zeros((4,), mx.float16)}
    mx.save_gguf(str(tmp_path / "m.gguf"), arrays, {"general.name": "x"})
    got = open_checkpoint(tmp_path / "m.gguf").tensors
    for name, array in arrays.items():
        assert got[name].shape == array.shape and got[name].data.tobytes() == np.array(array).tobytes()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("tail", [True, False])
def test_both_versions_byte_orders_and_endings(tmp_path, order, version, tail):
    array, block = RNG.standard_normal((2, 3)).astype(np.float32), RNG.integers(0, 256, 18, dtype=np.uint8).tobytes()
    tensors = [("w", (2, 3), 0, array.astype(order + "f4").tobytes()), ("q", (32,), 2, block), ("b", (3,), 24, b"abc")]
    keys = [("n", "u32", 7), ("deep", ("array", ("array", "str")), [["a"], []])] if order == "<" else [("n", "i64", -7)]
    checkpoint = opened(tmp_path / "m", writers.gguf(tensors, keys, version, order, tail=tail))
    suffix = "" if order == "<" else ":be"
    assert content(checkpoint.tensors) == {
        "w": ("F32", (2, 3), array.tobytes()), "q": ("Q4_0" + suffix, (32,), block), "b": ("I8", (3,), b"abc")
    }  # fmt: skip
    assert checkpoint.metadata["n"] == (7 if order == "<" else -7)


def test_another_alignment(tmp_path):
    tensors = [("a", (3,), 24, b"abc"), ("b", (2,), 24, b"de")]
    checkpoint = opened(tmp_path / "m", writers.gguf(tensors, [("general.alignment", "u32", 128)], align=128))
    assert {name: tensor.data.tobytes() for name, tensor in checkpoint.tensors.items()} == {"a": b"abc", "b": b"de"}


def test_a_file_without_tensors(tmp_path):
    for tail in (True, False):
        assert dict(opened(tmp_path / "m", writers.gguf(keys=[("a", "u8", 1)], tail=tail)).tensors) == {}


def test_the_order_of_the_file_does_not_matter(tmp_path):
    tensors = [("b", (3,), 24, b"abc"), ("a", (2,), 24, b"de")]
    one = opened(tmp_path / "1", writers.gguf(tensors))
    two = opened(tmp_path / "2", writers.gguf(tensors[::-1], [("general.name", "str", "x")]))
    assert content(one.tensors) == content(two.tensors)


def test_the_data_section_starts_at_the_alignment_after_the_header(tmp_path):
    """Reading from the end of the entries instead gives plausible numbers, a few bytes early."""
    array = np.arange(1, 65, dtype=np.float32)
    data = writers.gguf([("w", (64,), 0, array.tobytes())], [("n", "str", "xyz")])
    assert opened(tmp_path / "m", data).tensors["w"].to_numpy().tolist() == array.tolist()
    end = data.rindex(b"w") + 1 + 4 + 8 + 4 + 8
    assert 0 < len(data) - 256 - end < 32  # there is padding, which a naive reader would take for the first numbers
    wrong = data[:end] + data[end + 4 :]
    with pytest.raises(FormatError, match=r"truncated|padding"):
        opened(tmp_path / "m", wrong)


T = [("a", (8,), 24, bytes(8)), ("b", (4,), 24, b"abcd")]
LONG = ("b", (40,), 24, bytes(40))
DEEP = ("array", ("array", ("array", ("array", ("array", "u8")))))
BAD = {
    "version 1": (writers.gguf(T, version=1), "version 1"),
    "version 4": (writers.gguf(T, version=4), "version 4"),
    "overlap": (writers.gguf(T, offsets=[0, 0]), "inside tensor"),
    "gap": (writers.gguf(T, offsets=[0, 64]), "'b': leaves a gap"),
    "unaligned": (writers.gguf(T, offsets=[0, 8]), "'b': leaves a gap"),
    "gap at the start": (writers.gguf(T, offsets=[32, 64]), "'a': leaves a gap"),
    "shifted by one tensor": (writers.gguf([T[0], LONG], offsets=[32, 0]), "'a'.*inside tensor 'b'"),
    "duplicate tensor": (writers.gguf([T[0], T[0]]), "'a': is there twice"),
    "duplicate key": (writers.gguf(T, [("k", "u8", 1), ("k", "u8", 1)]), "key 'k' twice"),
    "unknown type": (writers.gguf([("a", (8,), 99, bytes(8))]), "type 99"),
    "removed type": (writers.gguf([("a", (32,), 4, bytes(20))]), "type 4"),
    "half a block": (writers.gguf([("a", (2, 16), 2, bytes(18))]), "whole blocks of Q4_0"),
    "overflow": (writers.gguf([("a", (1 << 40, 1 << 40), 24, bytes(8))]), "overflows"),
    "huge size": (writers.gguf([("a", ((1 << 64) - 1,), 24, bytes(8))]), "sizes"),
    "shape too large": (writers.gguf([("a", (9,), 24, bytes(8))], tail=False), "'a': needs"),
    "not UTF-8": (writers.gguf([(b"\xff", (8,), 24, bytes(8))]), "UTF-8"),
    "alignment 3": (writers.gguf(T, [("general.alignment", "u32", 3)]), "power of two"),
    "alignment 0": (writers.gguf(T, [("general.alignment", "u32", 0)]), "power of two"),
    "alignment is text": (writers.gguf(T, [("general.alignment", "str", "32")]), "power of two"),
    "a bool of 2": (writers.gguf(T, [("k", "bool", 2)]), "truth value"),
    "too many tensors": (writers.gguf(T, counts=(3, 0)), "inside tensor|truncated"),
    "tensor count of 2**63": (writers.gguf(T, counts=(1 << 63, 0)), "truncated|more than|type"),
    "too few tensors": (writers.gguf(T, counts=(1, 0)), "padding|after its last"),
    "nested arrays": (writers.gguf(T, [("k", DEEP, [[[[[1]]]]])]), "nested"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(tmp_path, kind):
    data, message = BAD[kind]
    with pytest.raises(FormatError, match=f"m: .*({message})"):
        opened(tmp_path / "m", data)


def test_padding_that_is_not_zero_is_refused(tmp_path):
    data = bytearray(writers.gguf(T))
    for at in (len(data) - 1, len(data) - 64 + 9, len(data) - 65):
        assert data[at] == 0
        changed = data.copy()
        changed[at] = 1
        with pytest.raises(FormatError):
            opened(tmp_path / "m", bytes(changed))


def test_an_array_that_claims_to_be_huge_costs_nothing(tmp_path):
    data = writers.gguf(T, [("k", ("array", "u8"), [1, 2, 3])])
    at = data.index(b"k") + 1 + 4 + 4
    for claimed in ((1 << 64) - 1, 1 << 40, 1000):
        with pytest.raises(FormatError, match=r"truncated|unknown|more than|of 0|type"):
            opened(tmp_path / "m", data[:at] + claimed.to_bytes(8, "little") + data[at + 8 :])
