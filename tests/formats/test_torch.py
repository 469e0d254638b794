"""PyTorch's zip and legacy files: views, shared storages, byte orders, dtypes; what is reported, not guessed."""

import collections
import io
import os
import pickle
import zipfile
import zlib

import ml_dtypes
import numpy as np
import pytest
import torch_writer as tw
import writers
from damage import content
from torch_writer import Global, Make, Store, window

from mlxdet.formats import FormatError, open_checkpoint

RNG = np.random.default_rng(17)
W = RNG.standard_normal((4, 6)).astype(np.float32)


@pytest.fixture(params=["zip", "legacy"])
def save(request, tmp_path):
    """Return a function that writes a value and its storages in one of the two formats, and opens the file."""

    def write(value, store, **options):
        writer = tw.torch_zip if request.param == "zip" else tw.torch_legacy
        path = tmp_path / "m.pt"
        path.write_bytes(writer(value, store, **options))
        return open_checkpoint(path)

    write.kind = request.param
    return write


def arrays(checkpoint):
    return {name: tensor.to_numpy() for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_state_dict(save, protocol):
    store = Store()
    values = {code: RNG.integers(0, 2, (2, 3)).astype(code) for code in tw.STORAGES}
    state = Make("collections", "OrderedDict", items={code: store.tensor(array) for code, array in values.items()},
                 state={"_metadata": Make("collections", "OrderedDict", items={"": {"version": 1}})})  # fmt: skip
    checkpoint = save({"model": state, "epoch": 3}, store, protocol=protocol)
    got = arrays(checkpoint)
    assert {name.removeprefix("model.") for name in got} == values.keys()
    for code, array in values.items():
        assert got[f"model.{code}"].dtype == array.dtype and got[f"model.{code}"].tolist() == array.tolist()
    assert checkpoint.metadata == {"epoch": 3} and checkpoint.unread == () and checkpoint.notes == ()


def test_strided_views_of_one_storage(save):
    store = Store()
    flat = store.storage(W.reshape(-1))
    views = {
        "whole": window(flat, 0, (4, 6), (6, 1)),
        "turned": window(flat, 0, (6, 4), (1, 6)),
        "row": window(flat, 6, (6,), (1,)),
        "column": window(flat, 2, (4,), (6,)),
        "every other": window(flat, 1, (4, 3), (6, 2)),
        "scalar": window(flat, 5, (), ()),
        "repeated": window(flat, 3, (5, 2), (0, 1)),
        "odd stride of one": window(flat, 0, (1, 6), ((1 << 60), 1)),
        "empty": window(flat, 0, (0, 6), (6, 1)),
        "empty at the end": window(flat, 24, (0,), (1,)),
        "diagonal": window(flat, 0, (4,), (7,)),
    }
    got = arrays(save(views, store))
    expected = {
        "whole": W, "turned": W.T, "row": W[1], "column": W[:, 2], "every other": W[:, 1::2], "scalar": W[0, 5],
        "repeated": np.broadcast_to(W[0, 3:5], (5, 2)), "odd stride of one": W[:1], "empty": W[:0],
        "empty at the end": W[0, :0], "diagonal": np.diagonal(W),
    }  # fmt: skip
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].shape == array.shape and got[name].tobytes() == array.tobytes(), name


def test_tied_tensors_are_named(save):
    store = Store()
    flat = store.storage(W.reshape(-1))
    state = {"head": window(flat, 0, (4, 6), (6, 1)), "embed": window(flat, 0, (4, 6), (6, 1)),
             "turned": window(flat, 0, (6, 4), (1, 6)), "copy": store.tensor(W)}  # fmt: skip
    checkpoint = save(state, store)
    assert checkpoint.tied == (("embed", "head"),)
    assert content(checkpoint.tensors)["embed"] == content(checkpoint.tensors)["copy"]


def test_bfloat16_and_bits_of_every_kind(save):
    store = Store()
    values = RNG.standard_normal(5).astype(ml_dtypes.bfloat16)
    checkpoint = save({"bf": store.tensor(values.view(np.uint16), "BFloat16Storage")}, store)
    assert checkpoint.tensors["bf"].dtype == "BF16" and checkpoint.tensors["bf"].data.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("dtype", "kind", "name"),
    [
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        ("float8_e5m2", ml_dtypes.float8_e5m2, "F8_E5M2"),
        ("uint16", np.uint16, "U16"),
        ("uint32", np.uint32, "U32"),
        ("uint64", np.uint64, "U64"),
        ("bfloat16", ml_dtypes.bfloat16, "BF16"),
    ],
)
def test_dtypes_without_a_storage_class(save, dtype, kind, name):
    store = Store()
    values = RNG.integers(0, 100, 12).astype(kind)
    flat = store.storage(values.view(np.uint8), "UntypedStorage")
    checkpoint = save({"w": window(flat, 2, (2, 4), (1, 2), dtype), "all": window(flat, 0, (12,), (1,), dtype)}, store)
    turned = values[2:10].reshape(4, 2).T
    assert content(checkpoint.tensors) == {
        "all": (name, (12,), values.tobytes()),
        "w": (name, (2, 4), turned.tobytes()),
    }


def test_big_endian_zip_files(tmp_path):
    store = Store()
    complex_values = (W + 1j * W[::-1]).astype(np.complex64)
    values = {"w": W, "i": np.arange(3), "c": complex_values, "b": np.arange(3, dtype=np.uint8)}
    value = {name: store.tensor(array, swap=True) for name, array in values.items()}
    (tmp_path / "m").write_bytes(tw.torch_zip(value, store, order=b"big"))
    got = arrays(open_checkpoint(tmp_path / "m"))
    assert got["w"].tolist() == W.tolist() and got["i"].tolist() == [0, 1, 2] and got["b"].tolist() == [0, 1, 2]
    assert got["c"].tolist() == complex_values.tolist()


def test_legacy_files_are_little_endian_whatever_machine_wrote_them(tmp_path):
    store = Store()
    (tmp_path / "m").write_bytes(tw.torch_legacy({"w": store.tensor(W)}, store, little=False))
    assert arrays(open_checkpoint(tmp_path / "m"))["w"].tolist() == W.tolist()


def test_legacy_views_of_storages(tmp_path):
    """PyTorch 0.x: a persistent id may name a view (key, offset, size) on the storage it gives."""
    store = Store()
    flat = store.storage(W.reshape(-1), view=("99", 6, 6))
    (tmp_path / "m").write_bytes(tw.torch_legacy({"w": window(flat, 1, (5,), (1,))}, store))
    assert arrays(open_checkpoint(tmp_path / "m"))["w"].tolist() == W[1, 1:].tolist()


def test_optimizers_have_integer_keys_and_numbers_beside_tensors(save):
    store = Store()
    value = {
        "optimizer": {
            "state": {
                0: {"step": 3, "exp_avg": store.tensor(W)},
                1: {"step": store.tensor(np.array(3.0)), "exp_avg": None},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "loss": [3.0, 2.5],
        "args": Make("argparse", "Namespace", state={"seed": 7}),
        "path": Make("pathlib", "PosixPath", "a", "b"),
        "big": 1 << 100,
        "device": Make("torch", "device", "cpu"),
        "dtype": Global("torch", "float32"),
        "nothing": {},
    }
    checkpoint = save(value, store)
    assert set(checkpoint.tensors) == {"optimizer.state.0.exp_avg", "optimizer.state.1.step"}
    assert checkpoint.metadata == {
        "optimizer.state.0.step": 3,
        "optimizer.state.1.exp_avg": None,
        "optimizer.param_groups.0.lr": 0.1,
        "optimizer.param_groups.0.betas": [0.9, 0.95],
        "optimizer.param_groups.0.params": [0, 1],
        "loss": [3.0, 2.5],
        "args": "argparse.Namespace({'seed': 7})",
        "path": "pathlib.PosixPath('a', 'b')",
        "big": hex(1 << 100),
        "device": "torch.device('cpu')",
        "dtype": "torch.float32",
        "nothing": {},
    }


def test_parameters_and_subclasses(save):
    store = Store()
    inner = store.tensor(W)
    value = {
        "p": Make("torch._utils", "_rebuild_parameter", inner, True, collections.OrderedDict()),
        "s": Make("torch._utils", "_rebuild_parameter_with_state", inner, True, collections.OrderedDict(), {"x": 1}),
        "b": Make("torch._tensor", "_rebuild_from_type_v2", Global("torch._utils", "_rebuild_tensor_v2"),
                  Global("torch.nn.parameter", "Buffer"), inner.call[1], {}),
    }  # fmt: skip
    checkpoint = save(value, store)
    assert {name: tensor.to_numpy().tolist() for name, tensor in checkpoint.tensors.items()} == dict.fromkeys(
        "psb", W.tolist()
    )
    assert checkpoint.unread == ()


def test_a_whole_module_is_read_as_its_attributes(save):
    store = Store()
    module = Make("net", "Net", state={"training": True, "_parameters": {"w": store.tensor(W)}})
    checkpoint = save({"model": module}, store)
    assert list(checkpoint.tensors) == ["model._parameters.w"] and checkpoint.metadata == {"model.training": True}
    assert checkpoint.notes == ("an object of class net.Net at 'model' is read as its attributes",)


@pytest.mark.parametrize(
    "name", ["_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor"]
)
def test_tensors_that_are_not_plain_are_reported(save, name):
    store = Store()
    checkpoint = save({"s": Make("torch._utils", name, store.tensor(W), 1), "w": store.tensor(W)}, store)
    assert list(checkpoint.tensors) == ["w"] and checkpoint.unread == ("s",)
    assert checkpoint.notes == ("'s' is a kind of tensor that is not plain: not read",)


def test_unknown_makers_of_tensors_are_reported_and_negated_views_too(save):
    store = Store()
    odd = Make("mylib", "decompress", store.tensor(W), 3)
    negated = window(store.storage(W.reshape(-1)), 0, (4, 6), (6, 1), extra=({"neg": True},))
    checkpoint = save({"odd": odd, "neg": negated, "plain": 1}, store)
    assert dict(checkpoint.tensors) == {} and checkpoint.unread == ("odd", "neg")
    assert "'odd' is made by mylib.decompress, which is not known: not read" in checkpoint.notes


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_an_os_system_payload_is_reported_and_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    pkl = pickle.dumps({"x": Evil(mark)}, 2)
    (tmp_path / "m").write_bytes(tw.torch_zip(None, Store(), pkl=pkl))
    checkpoint = open_checkpoint(tmp_path / "m")
    checkpoint.verify()
    assert not mark.exists() and ".system('touch " in checkpoint.metadata["x"]


def test_a_bare_storage_and_a_bare_tensor(save):
    store = Store()
    assert arrays(save({"s": store.storage(W.reshape(-1))}, store))["s"].tolist() == W.reshape(-1).tolist()
    store = Store()
    assert arrays(save(store.tensor(W), store))["tensor"].tolist() == W.tolist()


def flat():
    store = Store()
    return store, store.storage(W.reshape(-1))


BAD = {
    "beyond the end": (lambda s: window(s, 1, (4, 6), (6, 1)), "reaches element 24 of storage '0', which has 24"),
    "far beyond": (lambda s: window(s, 0, (2,), (1 << 61,)), "reaches element"),
    "huge offset": (lambda s: window(s, 1 << 61, (1,), (1,)), "reaches element"),
    "negative offset": (lambda s: window(s, -1, (1,), (1,)), "offset"),
    "negative stride": (lambda s: window(s, 5, (3,), (-1,)), "strides"),
    "negative shape": (lambda s: window(s, 0, (-1,), (1,)), "sizes"),
    "shape of text": (lambda s: window(s, 0, ("3",), (1,)), "sizes"),
    "overflowing shape": (lambda s: window(s, 0, (1 << 40, 1 << 40), (0, 0)), "overflows"),
    "strides of another length": (lambda s: window(s, 0, (4, 6), (1,)), "strides"),
    "offset of True": (lambda s: window(s, True, (4,), (1,)), "offset"),
}


@pytest.mark.parametrize("kind", BAD)
def test_windows_outside_their_storage_are_refused(save, kind):
    store, reference = flat()
    make, message = BAD[kind]
    with pytest.raises(FormatError, match=rf"m\.pt: tensor 'layer\.w': .*{message}"):
        save({"layer": {"w": make(reference)}}, store)


def test_a_tensor_that_repeats_one_number_without_end_is_refused(save, monkeypatch):
    store, reference = flat()
    checkpoint = save({"w": window(reference, 0, (1 << 20, 1 << 20), (0, 0))}, store)
    with pytest.raises(FormatError, match="repeats its storage to 4398046511104 bytes"):
        _ = checkpoint.tensors["w"].data


STRUCTURE = {
    "two entries of one name": (lambda t: {"a.b": t, "a": {"b": t}}, "'a.b': is the name of two"),
    "a number and a text of one name": (lambda t: {1: t, "1": t}, "'1': is the name of two"),
    "another persistent id": (lambda t: {"w": t, "v": tw.Reference(("module", 1, 2, 3))}, "no storage"),
    "an unknown storage class": (
        lambda t: {"w": tw.Reference(("storage", Global("torch", "OddStorage"), "0", "cpu", 3))}, "'torch.OddStorage'"
    ),
    "a storage class of another module": (
        lambda t: {"w": tw.Reference(("storage", Global("os", "FloatStorage"), "0", "cpu", 24))}, "os.FloatStorage"
    ),
    "one storage in two dtypes": (
        lambda t: {"w": t, "v": tw.Reference(("storage", Global("torch", "IntStorage"), "0", "cpu", 24))}, "two ways"
    ),
    "one storage of two sizes": (
        lambda t: {"w": t, "v": tw.Reference(("storage", Global("torch", "FloatStorage"), "0", "cpu", 23))}, "two ways"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRUCTURE)
def test_contradictions_are_refused(save, kind):
    store = Store()
    make, message = STRUCTURE[kind]
    with pytest.raises(FormatError, match=message):
        save(make(store.tensor(W)), store)


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


def test_deep_and_circular_values_are_refused(save, monkeypatch):
    store = Store()
    with pytest.raises(FormatError, match="nested more than"):
        save(nested(store.tensor(W), 150), store)
    store, loop = Store(), []
    loop += [loop, store.tensor(W)]
    with pytest.raises(FormatError, match="holds itself"):
        save({"a": loop}, store)
    # One list in many places grows without end when walked: 2**40 tensors in a few hundred bytes.
    monkeypatch.setattr("mlxdet.formats.torch_objects.MAX_VALUES", 10_000)
    store = Store()
    value = store.tensor(W)
    for _ in range(40):
        value = [value, value]
    with pytest.raises(FormatError, match="more than 10000 values"):
        save(value, store)


def test_storages_must_be_there_whole_and_be_named(tmp_path):
    path, store = tmp_path / "m", Store()
    value = {"w": store.tensor(W)}

    def refused(message, **options):
        path.write_bytes(tw.torch_zip(value, store, **options))
        with pytest.raises(FormatError, match=message):
            open_checkpoint(path)

    refused("storage that its pickle never names", extra={"archive/data/7": b"x"})
    refused("TorchScript", extra={"archive/constants.pkl": b""})
    refused("2 files named data.pkl", extra={"other/data.pkl": b""})
    refused("byteorder", order=b"middle")
    refused("after its pickle", pkl=tw.dumps(value) + b"x")
    key, (kind, raw, numel) = next(iter(store.data.items()))
    for changed in (raw[:-4], raw + bytes(4), b""):
        store.data = {key: (kind, changed, numel)}
        refused(f"has {len(changed)} bytes, not 96")
    store.data = {}
    refused("lacks storage '0'")


def test_other_members_are_noted(tmp_path):
    store = Store()
    value = {"w": store.tensor(W)}
    (tmp_path / "m").write_bytes(tw.torch_zip(value, store, root="x/y", extra={"x/y/extra/info.txt": b"1", "z": b""}))
    checkpoint = open_checkpoint(tmp_path / "m")
    assert [note.split("'")[1] for note in checkpoint.notes] == ["x/y/extra/info.txt", "z"]
    assert arrays(checkpoint)["w"].tolist() == W.tolist()


def test_files_without_checksums_are_read_and_noted(tmp_path, monkeypatch):
    store = Store()
    value = {"w": store.tensor(W)}
    monkeypatch.setattr(zipfile, "crc32", lambda data, value=0: 0)
    data = tw.torch_zip(value, store)
    monkeypatch.undo()
    assert zlib.crc32(b"x") != 0
    (tmp_path / "m").write_bytes(data)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert arrays(checkpoint)["w"].tolist() == W.tolist() and "without checksums" in checkpoint.notes[0]


def test_a_compressed_archive_has_the_same_content(tmp_path):
    store = Store()
    flat = store.storage(W.reshape(-1))
    value = {"w": window(flat, 0, (4, 6), (6, 1)), "t": window(flat, 0, (6, 4), (1, 6))}
    data = tw.torch_zip(value, store)
    with zipfile.ZipFile(io.BytesIO(data)) as members:
        again = writers.archive({name: members.read(name) for name in members.namelist()}, compress=True)
    (tmp_path / "1").write_bytes(data)
    (tmp_path / "2").write_bytes(again)
    one, two = (content(open_checkpoint(tmp_path / name).tensors) for name in "12")
    assert one == two


def test_legacy_storages_must_follow_each_other_to_the_end(tmp_path):
    path, store = tmp_path / "m", Store()
    value = {"w": store.tensor(W), "v": store.tensor(W[0])}
    data = tw.torch_legacy(value, store)
    at = data.index(W.tobytes()) - 8

    def refused(changed, message):
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(path)

    refused(data[:at] + (25).to_bytes(8, "little") + data[at + 8 :], "storage '0': does not state the 24 elements")
    refused(data[:at] + (-1).to_bytes(8, "little", signed=True) + data[at + 8 :], "storage '0'")
    refused(data + b"\0", "1 bytes after its last storage")
    refused(data[:-1], "storage '1'.*truncated")
    refused(tw.torch_legacy(value, store, keys=["0"]), "other storages")
    refused(tw.torch_legacy(value, store, keys=["0", "1", "1"]), "other storages")
    refused(tw.torch_legacy(value, store).replace(b"M\xe9\x03", b"M\xea\x03", 1), "known version")


def test_stored_tensors_stay_in_the_file(save):
    store = Store()
    data = save({"w": store.tensor(W)}, store).tensors["w"].data
    assert not data.flags.writeable and not data.flags.owndata
