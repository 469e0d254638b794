"""safetensors: reader and canonical writer against the safetensors package, and all that is refused."""

import io
import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from damage import content, extensions, refused_everywhere, refused_when_cut
from safetensors import deserialize

from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import BITS, FormatError, Tensor, from_numpy

RNG = np.random.default_rng(7)


def pack(header, data=b"", length=None):
    """Return a file with this header (bytes, or a JSON value) and data section."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def written(tensors):
    file = io.BytesIO()
    write_safetensors(file, tensors)
    return file.getvalue()


def read(path, data):
    path.write_bytes(data)
    return read_safetensors(path)


def refused(path):
    try:
        return content(read_safetensors(path)[0])
    except FormatError as problem:
        assert path.name in str(problem) and "\n" not in str(problem)
        return None


def every_dtype():
    """Return a tensor of every dtype of the format, and the awkward shapes."""
    tensors = {}
    for name, bits in BITS.items():
        data = RNG.integers(0, 256, 8 * bits // 8 * 3, dtype=np.uint8)
        tensors[f"layer.{name}"] = Tensor(name, (8, 3), data)
    tensors["scalar"] = from_numpy(np.float32(3.5).reshape(()))
    tensors["empty"] = from_numpy(np.zeros((0, 4), np.float64))
    tensors['ünï.∂\n"'] = from_numpy(np.arange(5, dtype=np.int64))
    return tensors


def test_what_we_write_we_read(tmp_path):
    tensors = every_dtype()
    back, metadata = read(tmp_path / "a", written(tensors))
    assert content(back) == content(tensors) and list(back) == sorted(tensors) and metadata == {}


def test_the_package_reads_what_we_write():
    tensors = every_dtype()
    theirs = dict(deserialize(written(tensors)))
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bytes(theirs[name]["data"]) == tensor.data.tobytes()
        assert tuple(theirs[name]["shape"]) == tensor.shape
        assert theirs[name]["dtype"] == tensor.dtype


def test_we_read_what_the_package_writes(tmp_path):
    arrays = {
        "z": RNG.standard_normal((3, 5)).astype(np.float32),
        "a": RNG.integers(-9, 9, (7,), dtype=np.int64),
        "bf": RNG.standard_normal(6).astype(ml_dtypes.bfloat16),
        "flag": np.array([True, False, True]),
        "half": np.array(1.5, np.float16),
        "none": np.zeros((2, 0), np.uint16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "a", metadata={"format": "np", "step": "3"})
    back, metadata = read_safetensors(tmp_path / "a")
    assert metadata == {"format": "np", "step": "3"} and list(back) == sorted(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape and back[name].data.tobytes() == array.tobytes()
    assert (
        back["bf"].dtype == "BF16" and back["bf"].to_numpy().view(ml_dtypes.bfloat16).tolist() == arrays["bf"].tolist()
    )


def test_the_writer_is_canonical():
    tensors = every_dtype()
    backwards = dict(reversed(tensors.items()))
    data = written(tensors)
    assert written(backwards) == data
    assert int.from_bytes(data[:8], "little") % 8 == 0
    # The layout itself is a promise: files of equal runs are compared by sha256sum.
    small = {"b": from_numpy(np.array([1, 2], np.uint8)), "a": from_numpy(np.array([3], np.uint16))}
    header = (
        b'{"a":{"dtype":"U16","shape":[1],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    )
    header += b" " * (-len(header) % 8)
    assert written(small) == struct.pack("<Q", len(header)) + header + b"\x03\x00\x01\x02"
    assert written({}) == struct.pack("<Q", 8) + b"{}      "


def test_the_writer_survives_a_file_that_takes_little_at_a_time(tmp_path):
    class Slow(io.RawIOBase):
        def __init__(self):
            self.taken = b""

        def write(self, data):
            self.taken += bytes(data[:7])
            return min(7, len(data))

    slow = Slow()
    write_safetensors(slow, every_dtype())
    assert len(slow.taken) == len(written(every_dtype()))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("q", Tensor("Q4_0", (32,), np.zeros(18, np.uint8)), "Q4_0"),
        ("w", Tensor("F32", (3,), np.zeros(8, np.uint8)), "do not fit"),
        ("n", Tensor("F32", (-1, -2), np.zeros(8, np.uint8)), "do not fit"),
        ("f", Tensor("F4", (3,), np.zeros(1, np.uint8)), "do not fit"),
        ("__metadata__", from_numpy(np.zeros(1)), "__metadata__"),
        ("\ud800", from_numpy(np.zeros(1)), "UTF-8"),
    ],
)
def test_the_writer_refuses_before_it_writes(name, tensor, message):
    file = io.BytesIO()
    with pytest.raises(FormatError, match=message):
        write_safetensors(file, {"a": from_numpy(np.ones(2)), name: tensor})
    assert file.getvalue() == b""


def test_bytes_stay_in_the_file(tmp_path):
    # Opening must cost the header, whatever the size of the data: a sparse file of 64 GiB opens at once.
    size = 64 << 30
    header = json.dumps({"w": entry("F32", [size // 4], 0, size)}).encode()
    with open(tmp_path / "big", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    tensors, _ = read_safetensors(tmp_path / "big")
    assert tensors["w"].data.nbytes == size and not tensors["w"].data.flags.writeable
    assert tensors["w"].data[-16:].tolist() == [0] * 16


def test_the_data_section_starts_after_the_header(tmp_path):
    """The mistake of reading every tensor a header too early gives plausible numbers; here it cannot be made."""
    first, second = (RNG.standard_normal(64).astype(np.float32) for _ in range(2))
    data = pack(
        {"a": entry("F32", [64], 0, 256), "b": entry("F32", [64], 256, 512)}, first.tobytes() + second.tobytes()
    )
    tensors, _ = read(tmp_path / "a", data)
    assert tensors["a"].to_numpy().tolist() == first.tolist() and tensors["b"].to_numpy().tolist() == second.tolist()
    wrong = np.frombuffer(data[:256], np.float32)  # base 0: the reading that fails silently
    assert wrong.tolist() != first.tolist()
    # A header whose offsets count from the start of the file, as that mistake would have it, is refused.
    base = 8 + len(json.dumps({"a": entry("F32", [64], 1000, 1256)}))
    shifted = pack({"a": entry("F32", [64], base, base + 256)}, first.tobytes())
    with pytest.raises(FormatError, match="gap"):
        read(tmp_path / "b", shifted)


F = entry("F32", [2], 0, 8)
FJ = json.dumps(F).encode()
BAD = {
    "truncated data": (pack({"a": F}, bytes(7)), "truncated"),
    "one extra byte": (pack({"a": F}, bytes(9)), "1 bytes after"),
    "gap at the start": (pack({"a": entry("F32", [2], 4, 12)}, bytes(12)), "'a': leaves a gap"),
    "gap between": (pack({"a": F, "b": entry("F32", [2], 12, 20)}, bytes(20)), "'b': leaves a gap"),
    "overlap": (pack({"a": F, "b": entry("F32", [2], 4, 12)}, bytes(12)), "'b': starts at 4, inside tensor 'a'"),
    "same range twice": (pack({"a": F, "b": F}, bytes(8)), "inside tensor 'a'"),
    "inside": (pack({"a": entry("F32", [4], 0, 16), "b": entry("F32", [1], 4, 8)}, bytes(16)), "'b'.*inside"),
    "no tensors, some data": (pack({}, bytes(4)), "4 bytes after"),
    "duplicate name": (pack(b'{"a":%s,"a":%s}' % (FJ, FJ), bytes(8)), "'a' twice"),
    "duplicate key in an entry": (pack(b'{"a":{"dtype":"F32","dtype":"I32"}}', bytes(8)), "'dtype' twice"),
    "too few bytes for the shape": (pack({"a": entry("F32", [3], 0, 8)}, bytes(8)), "needs 12"),
    "negative shape": (pack({"a": entry("F32", [-2, -1], 0, 8)}, bytes(8)), "sizes"),
    "huge size": (pack({"a": entry("F32", [2**70], 0, 8)}, bytes(8)), "sizes"),
    "overflowing product": (pack({"a": entry("F32", [2**32, 2**32, 2], 0, 8)}, bytes(8)), "overflows"),
    "overflow hidden by a zero": (pack({"a": entry("F32", [2**40, 2**40, 0], 0, 0)}), "overflows"),
    "product wraps to 8 bytes": (pack({"a": entry("U8", [2**61 + 1, 8], 0, 8)}, bytes(8)), "overflows"),
    "too many dimensions": (pack({"a": entry("U8", [1] * 65, 0, 1)}, bytes(1)), "dimensions"),
    "fractional size": (pack({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "sizes"),
    "true as a size": (pack({"a": entry("F32", [2, True], 0, 8)}, bytes(8)), "sizes"),
    "negative offset": (pack({"a": entry("F32", [2], -8, 0)}, bytes(8)), "byte positions"),
    "offsets backwards": (pack({"a": entry("F32", [2], 8, 0)}, bytes(8)), "-8 bytes"),
    "three offsets": (pack({"a": {**F, "data_offsets": [0, 4, 8]}}, bytes(8)), "byte positions"),
    "offset as text": (pack({"a": {**F, "data_offsets": ["0", "8"]}}, bytes(8)), "byte positions"),
    "infinite offset": (pack(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', bytes(8)), "Infinity"),
    "unknown dtype": (pack({"a": entry("F33", [2], 0, 8)}, bytes(8)), "'F33' is not known"),
    "dtype is a list": (pack({"a": entry(["F32"], [2], 0, 8)}, bytes(8)), "not known"),
    "half a byte": (pack({"a": entry("F4", [3], 0, 1)}, bytes(1)), "whole number of bytes"),
    "extra field": (pack({"a": {**F, "crc": 1}}, bytes(8)), "exactly"),
    "missing field": (pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "exactly"),
    "entry is a number": (pack({"a": 3}), "exactly"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata is a list": (pack({"__metadata__": []}), "__metadata__"),
    "header is a list": (pack([]), "not a JSON object"),
    "header starts with a space": (pack(b" {}"), "not a JSON object"),
    "not UTF-8": (pack(b'{"\xff":1}'), "UTF-8"),
    "not JSON": (pack(b"{nonsense"), "not JSON"),
    "bytes after the JSON": (pack(b"{}x"), "not JSON"),
    "deep JSON": (pack(b'{"a":' + b"[" * 200000), "deeply|not JSON"),
    "a number of many digits": (pack(b'{"a":' + b"9" * 10000 + b"}"), "too long"),
    "header longer than the file": (pack({"a": F}, bytes(8), length=1000), "declares a header of 1000"),
    "header length zero": (pack(b"", length=0), "not"),
    "header length huge": (pack({}, length=2**63), "declares"),
    "too short": (b"\x02\0\0", "too short"),
    "empty": (b"", "is empty"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(tmp_path, kind):
    data, message = BAD[kind]
    with pytest.raises(FormatError, match=message) as caught:
        read(tmp_path / "model.safetensors", data)
    assert "model.safetensors" in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def small_file():
    tensors = {"a": from_numpy(np.arange(3, dtype=np.float32)), "b.c": from_numpy(np.arange(4, dtype=np.uint8))}
    return tensors, written(tensors)


def test_truncation_at_every_byte_and_any_extension_is_refused(tmp_path):
    _, data = small_file()
    refused_when_cut(tmp_path / "m", data, refused)
    assert refused_everywhere(tmp_path / "m", extensions(data), refused) == 8


def test_a_header_shifted_by_one_tensor_is_refused(tmp_path):
    shapes = [("a", 3), ("b", 5), ("c", 4)]
    header, position = {}, 0
    for (name, _), (_, length) in zip(shapes, shapes[1:] + shapes[:1], strict=True):
        header[name] = entry("F32", [dict(shapes)[name]], position, position + 4 * length)
        position += 4 * length
    with pytest.raises(FormatError, match="needs"):
        read(tmp_path / "m", pack(header, bytes(position)))


def test_a_file_of_the_package_rewritten_by_us_holds_the_same(tmp_path):
    data = safetensors.numpy.save({"x": np.ones(2, np.float32)}, {"k": "v"})
    tensors, metadata = read(tmp_path / "m", data)
    again, _ = read(tmp_path / "n", written(tensors))
    assert content(again) == content(tensors) and metadata == {"k": "v"}


@pytest.mark.parametrize("kind", ["missing", "directory", "nul"])
def test_a_path_that_is_no_file_is_refused(tmp_path, kind):
    path = {"missing": tmp_path / "nothing", "directory": tmp_path, "nul": "a\0b"}[kind]
    with pytest.raises(FormatError, match=r"cannot be opened|not a regular file"):
        read_safetensors(path)
