"""npy and npz: against numpy and MLX, odd layouts normalised, and the zip container taken at no word."""

import struct
import zipfile
import zlib

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import writers
from damage import content, outcome, refused_when_cut

from mlxdet.formats import FormatError, checks, open_checkpoint
from mlxdet.formats.tensor import NUMPY

RNG = np.random.default_rng(11)


def opened(path, data):
    path.write_bytes(data)
    return open_checkpoint(path).tensors


def test_mlx_npz_with_bfloat16(tmp_path):
    values = RNG.standard_normal((3, 4)).astype(np.float32)
    arrays = {"a.b": mx.array(values).astype(mx.bfloat16), "c": mx.array(values), "i": mx.arange(5), "s": mx.array(2.5)}
    mx.savez(str(tmp_path / "m.npz"), **arrays)
    got = open_checkpoint(tmp_path / "m.npz").tensors
    assert got["a.b"].dtype == "BF16" and got["a.b"].shape == (3, 4)
    assert got["a.b"].data.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    assert got["c"].to_numpy().tolist() == values.tolist() and got["i"].dtype == "I32" and got["s"].shape == ()


@pytest.mark.parametrize("compressed", [False, True])
def test_whatever_numpy_writes_is_read_as_little_endian_c_order(tmp_path, compressed):
    arrays = {}
    for name, code in NUMPY.items():
        # Random bits: NaNs of every kind must come through as they are.
        raw = RNG.integers(0, 2 if name == "BOOL" else 256, (4, 3, np.dtype(code).itemsize), dtype=np.uint8)
        base = raw.reshape(-1).view(code).reshape(4, 3)
        arrays |= {name: base, f"{name}.F": np.asfortranarray(base), f"{name}.T": base.T, f"{name}.0": base[1, 1]}
        arrays[f"{name}.big"] = base.byteswap().view(np.dtype(code).newbyteorder(">"))
        arrays[f"{name}.bigF"] = np.asfortranarray(arrays[f"{name}.big"])
    (np.savez_compressed if compressed else np.savez)(tmp_path / "m.npz", **arrays)
    got = open_checkpoint(tmp_path / "m.npz").tensors
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = got[name]
        assert tensor.dtype == name.split(".")[0] and tensor.shape == array.shape
        expected = array.byteswap() if ".big" in name and array.itemsize > 1 else array
        assert tensor.data.tobytes() == expected.tobytes("C")


def test_a_single_npy_file(tmp_path):
    np.save(tmp_path / "m", RNG.standard_normal((2, 3)))
    got = open_checkpoint(tmp_path / "m.npy").tensors
    assert got["array"].to_numpy().tolist() == np.load(tmp_path / "m.npy").tolist()


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array(["a", "bcd"]), "U3"),
        (np.array([b"a", b"bcd"]), "S3"),
        (np.array(["a"], ">U4"), "U4"),
        (np.array(["2020-01-01"], "M8[D]"), "M8[D]"),
        (np.zeros(3, "V1"), "V1"),
    ],
)
def test_what_is_no_number_is_compared_as_bytes_under_a_raw_name(tmp_path, array, dtype):
    got = opened(tmp_path / "m", writers.npy(array))["array"]
    assert got.dtype == dtype and got.data.tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


A = np.arange(6, dtype=np.float32).reshape(2, 3)
BAD_NPY = {
    "object": (writers.npy(A, descr="|O"), "object array"),
    "structured": (writers.npy(A, descr=[("a", "<f4")]), "structured"),
    "subarray": (writers.npy(A, descr="(2,)<f4"), "not known"),
    "native order": (writers.npy(A, descr="=f4"), "not known"),
    "no such width": (writers.npy(A, descr="<f3"), "not known"),
    "negative shape": (writers.npy(A, shape=(-2, -3)), "header is damaged"),
    "overflow": (writers.npy(A, shape=(1 << 40, 1 << 40)), "overflows"),
    "wrapping": (writers.npy(A, shape=((1 << 61) + 6, 8)), "overflows"),
    "too short": (writers.npy(A, shape=(2, 4)), "needs 32"),
    "too long": (writers.npy(A, shape=(5,)), "needs 20"),
    "version": (writers.npy(A, version=(4, 0)), "version 4.0"),
    "code in the header": (writers.npy(A, descr="<f4', 'x': __import__('os').system('true'), '"), "damaged"),
    "header length": (b"\x93NUMPY\x01\x00\xff\xff" + b" " * 100, "65535 bytes"),
    "only magic": (b"\x93NUMPY", "not an npy"),
    "many dimensions": (writers.npy(A, shape=(1,) * 65), "dimensions"),
}


@pytest.mark.parametrize("kind", BAD_NPY)
def test_damaged_arrays_are_refused(tmp_path, kind):
    data, message = BAD_NPY[kind]
    with pytest.raises(FormatError, match=message):
        opened(tmp_path / "m", data)
    # The same array inside an archive is refused under its own name.
    with pytest.raises(FormatError, match=f"m: tensor 'w': .*{message}"):
        opened(tmp_path / "m", writers.archive({"w.npy": data}))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_npy(tmp_path, version):
    assert opened(tmp_path / "m", writers.npy(A, version=version))["array"].to_numpy().tolist() == A.tolist()


def test_an_archive_without_members_is_an_empty_checkpoint(tmp_path):
    np.savez(tmp_path / "m.npz")
    assert dict(open_checkpoint(tmp_path / "m.npz").tensors) == {}


def test_an_archive_written_to_a_pipe_has_its_sizes_behind_the_data(tmp_path):
    data = writers.streamed_archive({"a.npy": writers.npy(A), "b.npy": writers.npy(A + 1)})
    got = opened(tmp_path / "m", data)
    assert got["b"].to_numpy().tolist() == (A + 1).tolist()
    # The directory says how large b is, its descriptor says otherwise.
    at = data.rindex(b"PK\x07\x08")
    (tmp_path / "m").write_bytes(data[: at + 8] + b"\xff" + data[at + 9 :])
    with pytest.raises(FormatError, match=r"'b\.npy'.*sizes"):
        open_checkpoint(tmp_path / "m")


def test_zip64_archives(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
    data = writers.archive({"a.npy": writers.npy(A)})
    monkeypatch.undo()
    assert b"PK\x06\x06" in data and b"PK\x06\x07" in data
    path = tmp_path / "m"
    assert opened(path, data)["a"].to_numpy().tolist() == A.tolist()
    refused_when_cut(path, data)


def deflate(data):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def raw_archive(entries, gap=b"", before=b"", comment=b"", names=None, cut=None):
    """Return an archive by hand: (name, data, method, stated size or None) entries with `gap` between them.

    `names` are other names for the members' own headers, `cut` ends packed data early.
    """
    body, central = before, b""
    for index, (name, data, method, stated) in enumerate(entries):
        packed = deflate(data)[:cut] if method == 8 else data
        size = len(data) if stated is None else stated
        local_name = name if names is None else names[index]
        common = (0, method, 0, 0, zlib.crc32(data), len(packed), size)
        offset = len(body)
        body += struct.pack("<4s5H3I2H", b"PK\3\4", 20, *common, len(local_name), 0) + local_name + packed + gap
        central += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *common, len(name), 0, 0, 0, 0, 0, offset) + name
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries), len(entries), len(central), len(body), len(comment))
    return body + central + end + comment


ONE = (b"a.npy", writers.npy(A), 0, None)
TWO = (b"b.npy", writers.npy(A), 0, None)
BAD_ZIP = {
    "prefix": (raw_archive([ONE], before=b"PK\3\4"), "leaves a gap"),
    "gap": (raw_archive([ONE, TWO], gap=b"x"), "'b.npy': leaves a gap"),
    "gap at the end": (raw_archive([ONE], gap=b"x"), "1 bytes before its zip directory"),
    "comment": (raw_archive([ONE], comment=b"x"), "does not end with a zip directory"),
    "same name twice": (raw_archive([ONE, ONE]), "two members named 'a.npy'"),
    "two names for one array": (raw_archive([ONE, (b"a.npy", *TWO[1:])]), "two members"),
    "another local name": (raw_archive([ONE], names=[b"b.npy"]), "contradict"),
    "not an array inside": (raw_archive([ONE, (b"readme.txt", b"x", 0, None)]), "neither npz"),
    "two stored sizes": (raw_archive([(b"a.npy", writers.npy(A), 0, 5)]), "two sizes"),
    "unknown packing": (raw_archive([(b"a.npy", writers.npy(A), 12, None)]), "packed"),
}


@pytest.mark.parametrize("kind", BAD_ZIP)
def test_archives_that_are_not_tight_are_refused(tmp_path, kind):
    data, message = BAD_ZIP[kind]
    with pytest.raises(FormatError, match=message):
        opened(tmp_path / "m", data)


def test_hand_made_archives_are_read_when_they_are_right(tmp_path):
    assert set(opened(tmp_path / "m", raw_archive([ONE, TWO]))) == {"a", "b"}
    assert set(opened(tmp_path / "m", raw_archive([ONE, (b"b.npy", writers.npy(A), 8, None)]))) == {"a", "b"}


def test_members_that_overlap_are_refused(tmp_path):
    """A zip bomb of overlapping members: every entry of the directory points at the same bytes."""
    data = bytearray(raw_archive([ONE, TWO]))
    last = data.rindex(b"PK\1\2")
    data[last + 42 : last + 46] = bytes(4)
    with pytest.raises(FormatError, match="overlaps"):
        opened(tmp_path / "m", bytes(data))


@pytest.mark.parametrize("stated", [0, 100, 151, 153, 1 << 30])
def test_a_member_that_unpacks_to_another_size_is_refused_without_unpacking_it(tmp_path, stated):
    array = writers.npy(A)
    (tmp_path / "m").write_bytes(raw_archive([(b"a.npy", array, 8, stated)]))
    assert len(array) == 152 and outcome(tmp_path / "m") is None


def test_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    # 64 MB of zeros in 64 kB, under a limit of 1 MB: refused by its stated size, before anything is unpacked.
    zeros = np.zeros(16 << 20, np.float32)
    data = writers.archive({"w.npy": writers.npy(zeros)}, compress=True)
    assert len(data) < 70_000
    monkeypatch.setattr("mlxdet.formats.archive.MAX_EXPANDED", 1 << 20)
    tensors = opened(tmp_path / "m", data)  # opening unpacks the first bytes alone
    with pytest.raises(FormatError, match=r"'w\.npy'.*without compression"):
        _ = tensors["w"].data
    assert checks.MAX_EXPANDED == 4 << 30


def test_a_flipped_bit_of_stored_data_fails_its_checksum(tmp_path):
    data = bytearray(writers.archive({"a.npy": writers.npy(A), "b.npy": writers.npy(A)}))
    data[data.index(A.tobytes())] ^= 1
    tensors = opened(tmp_path / "m", bytes(data))
    with pytest.raises(FormatError, match=r"'a\.npy'.*CRC-32"):
        _ = tensors["a"].data
    with pytest.raises(FormatError, match="CRC-32"):
        open_checkpoint(tmp_path / "m").verify()
    assert tensors["b"].to_numpy().tolist() == A.tolist()


def test_stored_arrays_stay_in_the_file(tmp_path):
    big = np.zeros(1 << 20, np.float32)
    np.savez(tmp_path / "m.npz", a=big)
    data = open_checkpoint(tmp_path / "m.npz").tensors["a"].data
    assert not data.flags.writeable and not data.flags.owndata


def test_order_of_members_and_compression_do_not_change_the_content(tmp_path):
    one = opened(tmp_path / "1", writers.archive({"a.npy": writers.npy(A), "b.npy": writers.npy(A + 1)}))
    members = {"b.npy": writers.npy(np.asfortranarray(A + 1)), "a.npy": writers.npy(A.astype(">f4"))}
    two = opened(tmp_path / "2", writers.archive(members, compress=True))
    assert content(one) == content(two)


def test_truncated_deflate_streams_are_refused(tmp_path):
    array, path = writers.npy(A), tmp_path / "m"
    for cut in range(1, len(deflate(array))):
        path.write_bytes(raw_archive([(b"a.npy", array, 8, None)], cut=cut))
        assert outcome(path) is None
    assert opened(path, raw_archive([(b"a.npy", array, 8, None)]))["a"].to_numpy().tolist() == A.tolist()
