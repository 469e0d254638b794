"""Sharded checkpoints: shards merged, index and shards held against each other, and no way out of the directory."""

import json

import numpy as np
import pytest
import safetensors.numpy
import torch_writer as tw
from damage import content

from mlxdet.formats import FormatError, open_checkpoint

A, B, C = (np.arange(n, dtype=np.float32) for n in (2, 3, 4))


@pytest.fixture
def model(tmp_path):
    """Return the path of an index over two shards in a directory of their own."""
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file({"a": A, "b": B}, folder / "m-1.safetensors", {"format": "np"})
    safetensors.numpy.save_file({"c": C}, folder / "m-2.safetensors")
    return write(folder, {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"})


def write(folder, table, name="model.safetensors.index.json", **more):
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": table, **more}))
    return path


def test_the_index_and_its_directory_are_the_same_checkpoint(model):
    for path in (model, model.parent):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "sharded" and checkpoint.path == path
        assert {name: tensor.to_numpy().tolist() for name, tensor in checkpoint.tensors.items()} == {
            "a": A.tolist(), "b": B.tolist(), "c": C.tolist()
        }  # fmt: skip
        assert checkpoint.metadata == {"m-1.safetensors": {"format": "np"}, "index": {"total_size": 36}}


def test_other_shards_of_the_same_model_have_the_same_content(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    safetensors.numpy.save_file({"a": A, "b": B, "c": C}, other / "all.safetensors")
    index = write(other, dict.fromkeys("abc", "all.safetensors"))
    assert content(open_checkpoint(index).tensors) == content(open_checkpoint(model).tensors)


def test_shards_of_pytorch(tmp_path):
    table = {}
    for number, (name, array) in enumerate({"a": A, "b": B}.items()):
        store = tw.Store()
        writer = tw.torch_zip if number else tw.torch_legacy
        flat = store.storage(array)
        value = {key: tw.window(flat, 0, array.shape, (1,)) for key in (name, f"{name}2")}
        (tmp_path / f"p-{number}.bin").write_bytes(writer(value, store))
        table |= dict.fromkeys(value, f"p-{number}.bin")
    checkpoint = open_checkpoint(write(tmp_path, table, "pytorch_model.bin.index.json"))
    assert checkpoint.tensors["b2"].to_numpy().tolist() == B.tolist() and checkpoint.tied == (("a", "a2"), ("b", "b2"))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "sub/m.safetensors", "..", ".", "", "a\\b", "C:m", "m\0"]
)
def test_a_shard_outside_the_directory_is_refused(model, shard):
    safetensors.numpy.save_file({"a": A}, model.parent.parent / "secret.safetensors")
    write(model.parent, {"a": shard})
    with pytest.raises(FormatError, match=r"index\.json: names the shard .*not a file beside it"):
        open_checkpoint(model)


def test_index_and_shards_must_agree(model):
    folder, both, last = model.parent, "m-1.safetensors", "m-2.safetensors"
    for table, message in [
        ({"a": both, "c": last}, "'b': shard 'm-1.safetensors' has it, but the index does not"),
        ({"a": both, "b": both, "c": last, "d": last}, "'d': shard 'm-2.safetensors' lacks it"),
        ({"a": both, "b": last, "c": last}, "'b': shard 'm-1.safetensors' has it"),
        ({"a": both, "b": both, "c": "m-3.safetensors"}, r"m-3\.safetensors: cannot be opened"),
    ]:
        with pytest.raises(FormatError, match=message):
            open_checkpoint(write(folder, table))


def test_damage_in_a_shard_names_the_shard(model):
    shard = model.parent / "m-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"m-2\.safetensors: .*'c'.*truncated"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "weight_map"),
        ('{"weight_map": {"a": "m-1.safetensors", "a": "m-2.safetensors"}}', "'a' twice"),
        ('{"x": "weight_map", "weight_map"', "not JSON"),
        ('{"weight_map": ' + "[" * 200000, "deeply|not JSON"),
    ],
)
def test_damaged_indices_are_refused(model, text, message):
    model.write_text(text)
    with pytest.raises(FormatError, match=rf"index\.json: .*{message}"):
        open_checkpoint(model)


def test_an_index_cannot_be_its_own_shard(model):
    write(model.parent, {"a": model.name})
    with pytest.raises(FormatError, match=r"index\.json: is not a checkpoint"):
        open_checkpoint(model)


def test_checkpoint_files_beside_the_shards_are_said_not_to_be_read(model):
    safetensors.numpy.save_file({"m": A}, model.parent / "optimizer.safetensors")
    assert open_checkpoint(model.parent).notes == ("optimizer.safetensors is not in the index, and was not read",)
