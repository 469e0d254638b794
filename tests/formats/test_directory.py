"""Directories: one file, several, an index beside other files, a run of mlxdet and its checkpoints."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
import writers
from damage import content

from mlxdet.formats import FormatError, from_numpy, open_checkpoint, write_safetensors

A, B = (np.arange(n, dtype=np.float32) for n in (2, 3))


def beside(folder):
    """Put down what lies beside a model: none of it is a checkpoint."""
    (folder / "config.json").write_text('{"model_type": "llama", "weight": 1}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    (folder / "README.md").write_text("# A model\n")
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "notes.zip").write_bytes(writers.archive({"readme.txt": b"x"}))
    (folder / "cache").mkdir()


def test_the_one_checkpoint_file_of_a_directory_stands_for_it(tmp_path):
    beside(tmp_path)
    safetensors.numpy.save_file({"a": A}, tmp_path / "adapters.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "safetensors" and list(checkpoint.tensors) == ["a"]
    assert checkpoint.notes == ("read from adapters.safetensors",)


def test_several_files_are_told_apart_by_their_names(tmp_path):
    beside(tmp_path)
    safetensors.numpy.save_file({"a": A}, tmp_path / "model.safetensors", {"k": "v"})
    np.savez(tmp_path / "optimizer.npz", a=B)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "directory"
    assert {name: tensor.to_numpy().tolist() for name, tensor in checkpoint.tensors.items()} == {
        "model.safetensors:a": A.tolist(), "optimizer.npz:a": B.tolist()
    }  # fmt: skip
    assert checkpoint.metadata["model.safetensors"] == {"k": "v"}


def test_a_damaged_file_is_refused_and_not_passed_over(tmp_path):
    safetensors.numpy.save_file({"a": A}, tmp_path / "model.safetensors")
    np.savez(tmp_path / "optimizer.npz", a=B)
    data = (tmp_path / "optimizer.npz").read_bytes()
    (tmp_path / "optimizer.npz").write_bytes(data[:-1])
    with pytest.raises(FormatError, match=r"optimizer\.npz: "):
        open_checkpoint(tmp_path)


def test_a_directory_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(FormatError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    beside(tmp_path)
    with pytest.raises(FormatError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)


def test_an_index_is_preferred_and_safetensors_before_pytorch(tmp_path):
    beside(tmp_path)
    safetensors.numpy.save_file({"a": A}, tmp_path / "m.safetensors")
    np.savez(tmp_path / "other.npz", b=B)
    for name, shard in (
        ("pytorch_model.bin.index.json", "gone.bin"),
        ("model.safetensors.index.json", "m.safetensors"),
    ):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": shard}}))
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a"]
    assert checkpoint.notes == (
        "pytorch_model.bin.index.json is another index, and was not read",
        "other.npz is not in the index, and was not read",
    )


# Runs of mlxdet. Written here from the layout in the design, not with the trainer's code.


def save(run, step, value):
    folder = run / "checkpoints" / f"{step:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name, tensors in {
        "model.safetensors": {"w": from_numpy(np.full(3, value, np.float32))},
        "optimizer.safetensors": {
            "w.m": from_numpy(np.zeros(3, np.float32)),
            "step": from_numpy(np.array(step, np.uint64)),
        },
    }.items():
        with (folder / name).open("wb") as file:
            write_safetensors(file, tensors)
        data = (folder / name).read_bytes()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    state(folder, {"format": 1, "step": step, "recipe": "abc", "files": files})
    return folder


def state(folder, content):
    check = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps({**content, "check": check}, sort_keys=True, indent=1) + "\n")


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "runs" / "book"
    for step in (5, 10):
        save(run, step, step)
    (run / "run.json").write_text("{}")
    return run


def test_a_run_stands_for_its_newest_checkpoint(run):
    checkpoint = open_checkpoint(run)
    assert checkpoint.format == "mlxdet-run" and checkpoint.path == run / "checkpoints" / "00000010"
    assert list(checkpoint.tensors) == ["optimizer.step", "optimizer.w.m", "w"]
    assert checkpoint.tensors["w"].to_numpy().tolist() == [10, 10, 10]
    assert checkpoint.metadata == {"step": 10, "recipe": "abc"}
    assert checkpoint.notes == ("the newest checkpoint of the run, checkpoints/00000010",)
    checkpoint.verify()


def test_a_checkpoint_of_a_run_by_its_directory(run):
    checkpoint = open_checkpoint(run / "checkpoints" / "00000005")
    assert checkpoint.format == "mlxdet-checkpoint" and checkpoint.tensors["w"].to_numpy().tolist() == [5, 5, 5]


def test_remains_of_an_interrupted_save_are_no_checkpoint(run):
    (run / "checkpoints" / ".unfinished-00000015").mkdir()
    unfinished = run / "checkpoints" / "00000020"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"x")
    assert open_checkpoint(run).metadata["step"] == 10


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FormatError, match="no checkpoint yet"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_flipped_bit_of_a_checkpoint_is_refused_by_name(run, name):
    folder = run / "checkpoints" / "00000010"
    before = content(open_checkpoint(run).tensors)
    data = (folder / name).read_bytes()
    for bit in range(0, 8 * len(data), 5):  # every fifth: all bits of a byte have their turn
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(bytes(changed))
        try:
            after = content(open_checkpoint(run).tensors)
        except FormatError as problem:
            assert name in str(problem)
        else:
            # Blank space between the values of state.json means nothing.
            assert name == "state.json" and after == before and json.loads(changed) == json.loads(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_missing_short_and_exchanged_files_are_refused_by_name(run, name):
    file = run / "checkpoints" / "00000010" / name
    data = file.read_bytes()
    for changed in (data[:-1], data + b"x"):
        file.write_bytes(changed)
        with pytest.raises(FormatError, match=rf"{name}: has {len(changed)} bytes"):
            open_checkpoint(run)
    other = run / "checkpoints" / "00000005" / name
    file.write_bytes(other.read_bytes())  # a whole file, of another checkpoint
    with pytest.raises(FormatError, match=rf"{name}: does not match the SHA-256"):
        open_checkpoint(run).verify()
    file.unlink()
    with pytest.raises(FormatError, match=rf"{name}: cannot be opened"):
        open_checkpoint(run)


@pytest.mark.parametrize(
    "content", [{"format": 2, "files": {}}, {"format": 1}, {"format": 1, "files": {}}, {"format": 1, "files": []}]
)
def test_states_of_another_kind_are_refused(run, content):
    folder = run / "checkpoints" / "00000010"
    state(folder, content)
    with pytest.raises(FormatError, match=r"state\.json: (is not the state|does not describe)"):
        open_checkpoint(folder)
