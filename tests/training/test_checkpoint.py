"""Checkpoint files: canonical, whole or absent, and no damaged byte gets in."""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlxdet.errors import Fault, UsageError
from mlxdet.training import checkpoint
from mlxdet.training.checkpoint import Snapshot, load, published, rotate, save, sweep

FILES = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)


def snapshot(step=5, seed=0):
    rng = np.random.default_rng(seed)

    def tree():
        return {
            "b": rng.standard_normal((3, 4)).astype(np.float32),
            "a.weight": rng.standard_normal(5).astype(np.float32),
        }

    return Snapshot(tree(), tree(), tree(), step)


def same(a, b):
    trees = zip((a.weights, a.first, a.second), (b.weights, b.first, b.second), strict=True)
    return a.step == b.step and all(
        x.keys() == y.keys() and all(x[k].tobytes() == y[k].tobytes() and x[k].shape == y[k].shape for k in x)
        for x, y in trees
    )


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path, snapshot(), "r")
    assert same(load(path, "r"), snapshot()) and path.name == "00000005" and published(tmp_path) == [5]


def test_equal_states_give_equal_files_and_sha256sum_is_a_golden(tmp_path):
    a = save(tmp_path / "a", snapshot(), "r")
    turned = Snapshot(
        *({k: t[k] for k in reversed(t)} for t in (snapshot().weights, snapshot().first, snapshot().second)), 5
    )
    b = save(tmp_path / "b", turned, "r")
    for name in FILES:
        assert (a / name).read_bytes() == (b / name).read_bytes()
    said = json.loads((a / checkpoint.STATE).read_text())["files"]
    for name in FILES[:2]:
        assert said[name]["sha256"] == hashlib.sha256((a / name).read_bytes()).hexdigest()


def test_other_libraries_read_the_files(tmp_path):
    path = save(tmp_path, snapshot(), "r")
    model, optimizer = load_file(path / checkpoint.MODEL), load_file(path / checkpoint.OPTIMIZER)
    assert np.array_equal(model["b"], snapshot().weights["b"]) and set(model) == {"b", "a.weight"}
    assert set(optimizer) == {"b.m", "b.v", "a.weight.m", "a.weight.v", "step"} and optimizer["step"] == 5
    assert np.array_equal(optimizer["b.v"], snapshot().second["b"])


def test_saving_what_was_loaded_is_byte_stable(tmp_path):
    a = save(tmp_path / "a", snapshot(), "r")
    b = save(tmp_path / "b", load(a), "r")
    assert all((a / n).read_bytes() == (b / n).read_bytes() for n in FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_single_flipped_bit_is_refused_by_name(tmp_path, name):
    path = save(tmp_path, snapshot(), "r")
    whole = (path / name).read_bytes()
    for position in range(len(whole)):
        bit = 1 << (position * 5 % 8)
        (path / name).write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        with pytest.raises(UsageError) as caught:
            load(path, "r")
        assert str(path / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_every_length_and_an_extra_byte_are_refused_by_name(tmp_path, name):
    path = save(tmp_path, snapshot(), "r")
    whole = (path / name).read_bytes()
    for content in [*(whole[:n] for n in range(len(whole))), whole + b"\n", whole + b"\0", b"\n" + whole]:
        (path / name).write_bytes(content)
        with pytest.raises(UsageError) as caught:
            load(path, "r")
        assert str(path / name) in str(caught.value)
    (path / name).write_bytes(whole)
    load(path, "r")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path, snapshot(), "r")
    (path / name).unlink()
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        load(path, "r")


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    a, b = save(tmp_path / "a", snapshot(5), "r"), save(tmp_path / "b", snapshot(6, seed=1), "r")
    shutil.copy(b / checkpoint.OPTIMIZER, a / checkpoint.OPTIMIZER)
    with pytest.raises(UsageError, match=r"optimizer\.safetensors"):
        load(a, "r")


def test_another_runs_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, snapshot(), "r")
    with pytest.raises(UsageError, match="another recipe"):
        load(path, "other")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tree", ["weights", "first", "second"])
def test_a_non_finite_value_is_never_published(tmp_path, bad, tree):
    save(tmp_path, snapshot(4), "r")
    state = snapshot(5)
    getattr(state, tree)["b"][1, 1] = bad
    with pytest.raises(Fault, match=r"tensor b.* not finite.*last good checkpoint is step 4"):
        save(tmp_path, state, "r")
    assert published(tmp_path) == [4] and [p.name for p in tmp_path.iterdir()] == ["00000004"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """The disk fills at each write and each sync in turn."""
    good = save(tmp_path, snapshot(4), "r")
    calls = {"n": 0, "limit": 0}

    def limited(function):
        def call(*args, **kwargs):
            calls["n"] += 1
            if calls["n"] > calls["limit"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(checkpoint._Hashed, "write", limited(checkpoint._Hashed.write))
    monkeypatch.setattr(checkpoint, "sync_file", limited(checkpoint.sync_file))
    monkeypatch.setattr(checkpoint, "sync_directory", limited(checkpoint.sync_directory))
    failures = 0
    while published(tmp_path) == [4]:
        calls["n"] = 0
        try:
            save(tmp_path, snapshot(5), "r")
        except Fault as error:
            failures += 1
            assert "the disk is full" in str(error) and "last good checkpoint is step 4" in str(error)
            assert error.exit_code == 1 and "\n" not in str(error)
        assert same(load(good, "r"), snapshot(4))
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        calls["limit"] += 1
    assert failures > 8
    assert same(load(tmp_path / "00000005", "r"), snapshot(5))


def test_a_crash_at_any_system_call_leaves_whole_checkpoints_only(tmp_path):
    """Fork, and die without cleaning up at the n-th write, sync, rename or removal, for every n."""
    from mlxdet.training.checkpoint import _Hashed

    save(tmp_path, snapshot(4), "r")
    n, finished = 0, False
    while not finished:
        n += 1
        pid = os.fork()
        if pid == 0:
            left = n

            def dying(function):
                def call(*args, **kwargs):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os._exit(9)
                    return function(*args, **kwargs)

                return call

            _Hashed.write = dying(_Hashed.write)
            for module, name in ((checkpoint, "sync_file"), (checkpoint, "sync_directory"), (os, "rename"), (os, "mkdir"),
                                 (os, "unlink"), (os, "rmdir")):  # fmt: skip
                setattr(module, name, dying(getattr(module, name)))
            try:
                save(tmp_path, snapshot(5), "r")
                rotate(tmp_path, 1)
            except BaseException:
                os._exit(8)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        steps = published(tmp_path)
        assert steps and set(steps) <= {4, 5}
        for step in steps:
            assert same(load(checkpoint.directory(tmp_path, step), "r"), snapshot(step))
        finished = code == 0
        if not finished:
            shutil.rmtree(tmp_path)
            save(tmp_path, snapshot(4), "r")
    sweep(tmp_path)
    assert n > 12 and [p.name for p in tmp_path.iterdir()] == ["00000005"]


def test_leftovers_of_a_crash_are_swept_and_never_count(tmp_path):
    good = save(tmp_path, snapshot(4), "r")
    shutil.copytree(good, tmp_path / ".unfinished-00000008")
    shutil.copytree(good, tmp_path / "00000009")
    (tmp_path / "00000009" / checkpoint.STATE).unlink()
    (tmp_path / "notes").mkdir()
    assert published(tmp_path) == [4]
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000004", "notes"]


@pytest.mark.parametrize("keep, left", [(0, [1, 2, 3, 10]), (1, [10]), (2, [3, 10]), (9, [1, 2, 3, 10])])
def test_rotation_keeps_the_newest(tmp_path, keep, left):
    for step in (3, 1, 10, 2):
        save(tmp_path, snapshot(step), "r")
    removed = rotate(tmp_path, keep)
    assert published(tmp_path) == left and sorted(removed + left) == [1, 2, 3, 10]


def test_random_damage_never_loads_as_something_else(tmp_path):
    path, rng = save(tmp_path, snapshot(), "r"), random.Random(0)
    for _ in range(300):
        name = rng.choice(FILES)
        whole = (path / name).read_bytes()
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (path / name).write_bytes(content)
        with contextlib.suppress(UsageError):
            assert same(load(path, "r"), snapshot()) and bytes(content) == whole
        (path / name).write_bytes(whole)
