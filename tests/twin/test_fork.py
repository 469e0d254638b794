"""A fork goes on from a checkpoint; without a change it is the old run, with one the manifest and `diverge` name it."""

import json
import shutil

import pytest

import mlxdet
from mlxdet.config import TrainConfig
from mlxdet.errors import UsageError
from mlxdet.formats import content_digest, open_checkpoint
from mlxdet.training.run import Run
from tests.conftest import mlxdet as run_mlxdet

RECIPE = {
    "preset": "nano", "layers": 1, "width": 16, "heads": 2, "context": 16, "mlp": 32, "batch": 4, "steps": 12,
    "dropout": 0.1, "device": "cpu", "val_every": 6, "val_windows": 8, "save_every": 4, "keep": 0, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def parent(text, tmp_path_factory):
    return mlxdet.train(TrainConfig.of(data=(str(text),), **RECIPE), tmp_path_factory.mktemp("fork") / "parent")


def digest(run: Run) -> str:
    return content_digest(open_checkpoint(run.path).tensors)


def test_without_a_change_it_is_the_old_run_to_the_bit(parent, tmp_path):
    run = mlxdet.fork(parent.path, 8, tmp_path / "control", {})
    assert digest(run) == digest(parent)
    for name in ("metrics.jsonl", "validation.jsonl"):
        assert (run.path / name).read_bytes() == (parent.path / name).read_bytes()
    assert run.manifest["forked"]["changed"] == []


def test_a_change_is_recorded_and_named_as_the_cause(parent, tmp_path):
    run = mlxdet.fork(parent.path, 8, tmp_path / "run", {"max_lr": 1e-3})
    origin = run.manifest["forked"]
    assert (origin["run"], origin["step"], origin["recipe"]) == (str(parent.path), 8, parent.recipe)
    assert origin["changed"] == [["max_lr", 2e-3, 1e-3]]
    lines, old = ({r["step"]: r for r in x.records()} for x in (run, parent))
    assert [s for s in lines if lines[s] != old[s]] == [9, 10, 11, 12]
    done = run_mlxdet("diverge", str(parent.path), str(run.path), COLUMNS="200")
    assert done.returncode == 1
    assert "different config: max_lr 0.002 / 0.001" in done.stdout
    assert "step 9" in done.stdout


def test_another_seed_means_other_data_and_other_masks(parent, tmp_path):
    run = mlxdet.fork(parent.path, 4, tmp_path / "run", {"seed": 8})
    assert [c[0] for c in run.manifest["forked"]["changed"]] == ["seed", "data_seed"]
    lines, old = ({r["step"]: r for r in x.records()} for x in (run, parent))
    assert [s for s in lines if lines[s]["rows"] != old[s]["rows"]] == list(range(5, 13))
    assert run.config.seeds.init_seed == 3


def test_tokens_go_on_from_the_checkpoint_with_another_batch(parent, tmp_path):
    run = mlxdet.fork(parent.path, 8, tmp_path / "run", {"batch": 2, "steps": 10})
    assert [r["tokens"] for r in run.records()][7:] == [8 * 64, 8 * 64 + 32, 8 * 64 + 64]


def test_a_killed_fork_resumes_to_the_same_bits(parent, tmp_path):
    whole = mlxdet.fork(parent.path, 4, tmp_path / "whole", {"max_lr": 1e-3})
    cut = tmp_path / "cut"
    mlxdet.fork(parent.path, 4, cut, {"max_lr": 1e-3})
    for step in (8, 12):
        shutil.rmtree(cut / "checkpoints" / f"{step:08d}")
    assert digest(mlxdet.resume(cut)) == digest(whole)
    shutil.rmtree(cut / "checkpoints" / "00000004")
    for step in (8, 12):
        shutil.rmtree(cut / "checkpoints" / f"{step:08d}")
    with pytest.raises(UsageError, match="interrupted before it began"):
        mlxdet.resume(cut)  # never from the initial weights


def test_the_checkpoint_of_the_fork_is_kept_for_a_rollback(parent, tmp_path):
    options = {"on_spike": "rollback", "rollback_steps": 100, "keep": 1}
    assert mlxdet.fork(parent.path, 8, tmp_path / "run", options).steps() == [8, 12]


@pytest.mark.parametrize(
    ("at", "changes", "message"),
    [
        (5, {}, "no checkpoint of step 5; it has 4, 8, 12"),
        (8, {"width": 32}, "--width: a fork goes on with the weights"),
        (8, {"steps": 8}, "--steps: the fork is at step 8 already"),
        (8, {"init_seed": 1}, "--init-seed"),
        (8, {"max_lr": 1e-5}, "--min-lr"),
    ],
)
def test_what_cannot_be_forked_is_refused_before_anything_is_written(parent, tmp_path, at, changes, message):
    with pytest.raises(UsageError) as caught:
        mlxdet.fork(parent.path, at, tmp_path / "run", changes)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_command(parent, tmp_path):
    done = run_mlxdet("fork", str(parent.path), "--at", "8", "--steps", "10", "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 10
    assert run_mlxdet("fork", str(parent.path), "--at", "7", "--out", str(tmp_path / "x")).returncode == 2
