"""A fork goes on from a checkpoint; without a change it is the old run, with one the manifest and `diverge` name it."""

import json
import shutil

import pytest

import mlxdet
from mlxdet.cli import run as command
from mlxdet.config import TrainConfig
from mlxdet.errors import UsageError
from mlxdet.formats import content_digest, open_checkpoint
from mlxdet.measure.investigate import investigate
from mlxdet.measure.replay import replay
from mlxdet.training.run import Run
from tests.conftest import mlxdet as run_mlxdet
from tests.twin.test_spike_policy import config as spiky
from tests.twin.test_spike_policy import content, poison, texts, trained  # noqa: F401

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
        (8, {"depth": 4}, "--depth: a fork goes on with the weights"),
        (8, {"preset": "tiny"}, "--preset: a fork goes on with the weights"),
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


@pytest.mark.parametrize("where", ["parent", "parent/checkpoints/inside", "."])
def test_a_fork_lies_beside_the_old_run_and_never_replaces_it(parent, where):
    before = {p: p.read_bytes() for p in parent.path.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"--out: .* is not beside"):
        mlxdet.fork(parent.path, 8, parent.path.parent / where, {}, overwrite=True)
    assert {p: p.read_bytes() for p in parent.path.rglob("*") if p.is_file()} == before


def test_the_steps_of_a_fork_are_replayed_and_those_before_it_are_not_its_own(parent, tmp_path):
    run = mlxdet.fork(parent.path, 4, tmp_path / "run", {"batch": 2, "keep": 1})
    assert run.steps() == [4, 12]  # where it began is kept: nothing else leads to its first steps
    found = replay(run, 12)
    assert (found.start, found.logged, found.same) == (4, 8, 8)
    for step, start in ((4, None), (1, None), (12, 0)):
        with pytest.raises(UsageError, match=f"up to 4 were trained by {parent.path}, which it was forked from"):
            replay(run, step, start=start)
    shutil.rmtree(run.checkpoints / "00000004")
    with pytest.raises(UsageError, match="no checkpoint before step 12 is left"):
        replay(run, 12)


def test_a_fork_of_a_run_that_rolled_back_knows_it(trained, tmp_path):  # noqa: F811
    old = trained["rollback"]  # from step 60 back to 40
    control = mlxdet.fork(old.path, 50, tmp_path / "control", {})
    want = content(old)
    assert content(control, 90) == {k: v for k, v in want.items() if not k.endswith("jsonl")}
    assert (control.path / "metrics.jsonl").read_bytes() == b"".join(
        json.dumps(r).encode() + b"\n" for r in old.records()
    )
    assert control.past() == old.past()
    run = mlxdet.fork(old.path, 50, tmp_path / "run", {"on_spike": "warn", "rollback_factor": 0.25})
    assert run.manifest["forked"]["changed"] == [["on_spike", "rollback", "warn"], ["rollback_factor", 0.5, 0.25]]
    assert {r["step"]: r["lr"] for r in run.records()}[51] != {r["step"]: r["lr"] for r in old.records()}[51]
    for made in (control, run):
        assert replay(made, 90, start=50).same == 40
    with pytest.raises(UsageError, match=r"--rollback-factor: the run has 0\.25, asked for 0\.5"):
        mlxdet.resume(run.path, changes={"rollback_factor": 0.5})  # it is no matter of comfort after a rollback
    before = mlxdet.fork(old.path, 40, tmp_path / "before", {"on_spike": "warn"})
    assert before.past().detours == () and replay(before, 90, start=40).same == 50


def test_a_rollback_in_a_fork_finds_its_checkpoint(texts, tmp_path):  # noqa: F811
    """The fork begins at 8, no multiple of 20: back to 8 from a spike in step 25, later to 20 from one in step 45."""
    old = mlxdet.train(spiky(texts[0], save_every=8, steps=12), tmp_path / "old")
    rows = [int(r) for r in (texts[2].rows(25)[0], *texts[2].rows(45))]
    text = poison(texts[0].read_bytes(), rows, tmp_path / "bad.txt")
    changes = {"data": (str(text),), "on_spike": "rollback", "steps": 60, "keep": 1, "save_every": 1}
    run = mlxdet.fork(old.path, 8, tmp_path / "run", changes)
    assert [(d.step, d.to) for d in run.past().detours] == [(25, 8), (45, 20)]
    assert replay(run, 60, start=8).same == 52


def test_a_spike_in_the_first_steps_of_a_fork_is_investigated_from_where_it_began(texts, tmp_path):  # noqa: F811
    text = poison(texts[0].read_bytes(), [int(texts[2].rows(60)[2])], tmp_path / "bad.txt")
    old = mlxdet.train(spiky(text, save_every=50, steps=60), tmp_path / "old")
    run = mlxdet.fork(old.path, 50, tmp_path / "run", {"max_lr": 9e-3})
    found = investigate(run, 60)
    assert found.verdict == "data" and found.together.rows == (2,) and found.lineage is None
    assert [(p.name, p.step) for p in found.places][:2] == [("before the step", 59), ("9 steps earlier", 50)]
    mlxdet.train(spiky(text, save_every=59, steps=60), tmp_path / "close")
    run = mlxdet.fork(tmp_path / "close", 59, tmp_path / "next", {"max_lr": 9e-3})
    found = investigate(run, 60)
    assert [p.name for p in found.places] == ["before the step", "another init seed"] and found.learning_rates == []
    assert found.verdict == "data" and "0 step" not in found.headline


def test_batches_shows_what_each_branch_read(trained, capsys):  # noqa: F811
    run = trained["rollback"]
    logged = {r.get("detour", 0): r["batch"] for r in run.records(branches=True) if r["step"] == 60}
    for option, branch in (([], 1), (["--detour", "1"], 1), (["--detour", "0"], 0)):
        assert command(["batches", str(run.path), "--step", "60", "--json", *option]) == 0
        assert json.loads(capsys.readouterr().out)["batch"] == logged[branch]
    assert command(["batches", str(run.path), "--step", "60", "--detour", "2"]) == 2
    assert "it has had 1 rollbacks" in capsys.readouterr().err
