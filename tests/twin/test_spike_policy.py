"""What `--on-spike` does at a spike: bits that do not change where they must not, and runs that survive any kill."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mlxdet
from mlxdet.config import TrainConfig
from mlxdet.data import open_corpus
from mlxdet.errors import Fault, UsageError
from mlxdet.formats import read_safetensors
from mlxdet.seeds import Splitmix64, stream
from mlxdet.training.corpora import text_batches
from mlxdet.training.detours import Detour, detour_at, factor_at, target
from mlxdet.training.run import Run
from mlxdet.training.schedule import learning_rate

SHAPE = {"preset": "nano", "layers": 1, "width": 16, "heads": 2, "context": 16, "mlp": 32, "batch": 4}
RECIPE = SHAPE | {
    "steps": 90, "max_lr": 1e-2, "warmup": 5, "device": "cpu", "val_every": 30, "val_windows": 8, "save_every": 25,
    "keep": 0, "spike_window": 20, "rollback_steps": 20, "rollback_ramp": 20, "seed": 3, "dropout": 0.1,
}  # fmt: skip
PLANTED = 60


def config(text: Path, **options) -> TrainConfig:
    return TrainConfig.of(**{"data": (str(text),), **RECIPE, **options})


def poison(clean: bytes, rows: list[int], where: Path) -> Path:
    """Write `clean` with 17 random bytes in the place of each row."""
    text = bytearray(clean)
    for row in rows:
        text[row : row + 17] = bytes(random.Random(row).randrange(128, 256) for _ in range(17))
    where.write_bytes(text)
    return where


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text that is soon learned, and the same with one row of step 60 made of random bytes."""
    where = tmp_path_factory.mktemp("texts")
    clean = b"abcdefghijklmnop" * 8000
    (where / "clean.txt").write_bytes(clean)
    batches = text_batches(
        config(where / "clean.txt").resolve(), open_corpus((str(where / "clean.txt"),), None, None, 0.01)
    )
    row = int(batches.rows(PLANTED)[2])
    return where / "clean.txt", poison(clean, [row], where / "bad.txt"), batches


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """The runs of the poisoned text, one for each policy; `stop` ends in a Fault."""
    where, runs = tmp_path_factory.mktemp("runs"), {}
    for policy in ("warn", "skip", "rollback"):
        runs[policy] = mlxdet.train(config(texts[1], on_spike=policy), where / policy)
    with pytest.raises(Fault) as caught:
        mlxdet.train(config(texts[1], on_spike="stop"), where / "stop")
    runs["stop"], runs["message"] = Run(where / "stop"), str(caught.value)
    return runs


def content(run: Run, step: int | None = None) -> dict[str, bytes]:
    """Return what must be equal in two equal runs."""
    last = run.checkpoints / f"{run.steps()[-1] if step is None else step:08d}"
    files = [last / n for n in ("model.safetensors", "optimizer.safetensors", "state.json")]
    logs = [run.path / n for n in ("metrics.jsonl", "validation.jsonl")]
    return {f.name: f.read_bytes() for f in (files if step else files + logs)}


def by_step(run: Run, **options) -> dict[int, dict]:
    return {r["step"]: r for r in run.records(**options)}


def test_without_a_spike_a_policy_changes_no_bit(texts, tmp_path):
    want = None
    for name, options in {
        "warn": {}, "none": {"spike_detect": False}, "stop": {"on_spike": "stop"}, "skip": {"on_spike": "skip"},
        "rollback": {"on_spike": "rollback"},
    }.items():  # fmt: skip
        run = mlxdet.train(config(texts[0], steps=40, **options), tmp_path / name)
        files = content(run)
        state = json.loads(files.pop("state.json"))
        assert state["format"] == 1
        want = want or files
        assert files == want, name


def test_warn_makes_the_update_and_says_so(trained):
    spikes = [e for e in trained["warn"].records("events.jsonl") if e["event"] == "spike"]
    assert [(e["step"], e["onset"], e["action"]) for e in spikes] == [(PLANTED, True, "warn")]
    assert spikes[0]["loss_deviations"] > 6
    assert "skipped" not in by_step(trained["warn"])[PLANTED]


def test_stop_saves_the_state_before_and_a_resume_goes_on_as_if_never_stopped(trained, texts):
    assert trained["stop"].steps()[-1] == PLANTED - 1
    assert f"step {PLANTED}: loss" in trained["message"]
    assert f"last good checkpoint: step {PLANTED - 1}" in trained["message"]
    with pytest.raises(Fault):
        mlxdet.resume(trained["stop"].path)  # the same spike stops it again
    run = mlxdet.resume(trained["stop"].path, changes={"on_spike": "warn"})
    assert content(run) == content(trained["warn"])


def test_skip_leaves_weights_and_moments_and_counts_updates_for_adamw(trained, texts, tmp_path):
    lines = by_step(trained["skip"])
    assert [s for s, r in lines.items() if r.get("skipped")] == [PLANTED]
    before, after = (
        mlxdet.train(config(texts[1], on_spike="skip", steps=90, save_every=s), tmp_path / str(s)).checkpoints
        / f"{s:08d}"
        for s in (PLANTED - 1, PLANTED)
    )
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = read_safetensors(before / name)[0], read_safetensors(after / name)[0]
        moved = [k for k in x if x[k].data.tobytes() != y[k].data.tobytes()]
        assert moved == (["step"] if name.startswith("optimizer") else []), name
    assert json.loads((after / "state.json").read_text())["skipped"] == 1
    # The control: a run that makes the update moves them.
    assert by_step(trained["warn"])[PLANTED + 1]["loss_hex"] != lines[PLANTED + 1]["loss_hex"]


def test_adamw_after_a_skipped_update_by_hand(texts):
    from mlxdet import backends

    backend = backends.activate("cpu", "deterministic")
    import mlx.core as mx

    from mlxdet.training.detours import Past
    from mlxdet.training.step import State, TrainStep, initial_state

    c = config(texts[0], dropout=0.0).resolve()
    step = TrainStep(c, 256, backend)
    start = initial_state(c, 256)
    state = State(start.weights, start.first, start.second, 7, Past(skipped=3))
    batch = texts[2].batch(8)
    after, outcome = step(state, batch)
    _, grads = step.gradient(start.weights, mx.array(batch.tokens[0]), [None, None])
    o, name, scored = c.optim, "blocks.0.mlp.up.weight", 4 * 16
    g = np.array(grads[name], np.float64) / scored * min(1.0, o.grad_clip / (outcome.grad_norm.item() + 1e-6))
    u, lr = 8 - 3, learning_rate(o, 8)
    m, v = (1 - o.beta1) * g / (1 - o.beta1**u), (1 - o.beta2) * g * g / (1 - o.beta2**u)
    w = np.array(start.weights[name], np.float64)
    want = w * (1 - lr * o.weight_decay) - lr * m / (np.sqrt(v) + o.eps)
    moved = np.array(after.weights[name], np.float64) - w
    np.testing.assert_allclose(moved, want - w, rtol=2e-3, atol=1e-8)


def test_a_limit_is_met_exactly_at_float32():
    from mlxdet.training.step import _float32_up

    for value in (0.1, 1.0, 3.3333333, 1e-30, 1e30, 2.0**-140):
        up = _float32_up(value)
        assert float(up) >= value
        assert float(np.nextafter(up, np.float32(-np.inf))) < value
    assert _float32_up(float("inf")) == np.float32(np.inf)


def test_rollback_reads_other_data_with_smaller_steps(trained, texts):
    run, batches = trained["rollback"], texts[2]
    every = list(run.records(branches=True))
    assert [r["step"] for r in every] == [*range(1, 61), *range(41, 91)]
    assert [r["step"] for r in run.records()] == list(range(1, 91))
    lines = by_step(run)
    c = run.config
    for step in (41, 50, 60, 61, 90):
        key = stream(3, "detour", step, 1)
        rows = Splitmix64(key).integers(4, batches.positions) if step <= 60 else batches.rows(step)
        assert lines[step]["rows"] == list(map(int, rows)), step
        cut = 0.5 + 0.5 * min(1.0, (step - 41) / 20)
        assert lines[step]["lr"] == pytest.approx(learning_rate(c.optim, step) * cut, rel=1e-15)
        assert lines[step]["detour"] == 1
    assert [e["to"] for e in run.records("events.jsonl") if e["event"] == "rollback"] == [40]
    assert run.past() == mlxdet.training.detours.Past(0, (Detour(60, 40),))
    assert json.loads((run.checkpoints / "00000090" / "state.json").read_text())["detours"] == [[60, 40]]


def test_rollback_is_the_same_twice(trained, texts, tmp_path):
    run = mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "again")
    assert content(run) == content(trained["rollback"])


def test_rollback_does_not_depend_on_what_is_saved(trained, texts, tmp_path):
    run = mlxdet.train(config(texts[1], on_spike="rollback", save_every=7, keep=1, val_every=0), tmp_path / "run")
    want = content(trained["rollback"])
    want.pop("validation.jsonl")
    assert content(run, 90) == {k: v for k, v in want.items() if k != "metrics.jsonl"}
    assert (run.path / "metrics.jsonl").read_bytes() == want["metrics.jsonl"]


KILLER = """
import os, sys
import mlxdet
from mlxdet.training import checkpoint, trainer, run
where, left = sys.argv[1], int(sys.argv[2])
def deadly(owner, name, before):
    whole = getattr(owner, name)
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if before and left == 0:
            os._exit(9)
        result = whole(*args, **kwargs)
        if not before and left == 0:
            os._exit(9)
        return result
    setattr(owner, name, wrapped)
point, before = sys.argv[3].rsplit("-", 1)
owner, name = {"write": (run.Log, "write"), "remove": (checkpoint, "_remove"), "load": (run.Run, "load"),
               "roll": (trainer.Trainer, "_roll_back"), "save": (checkpoint, "save"),
               "rotate": (checkpoint, "rotate")}[point]
deadly(owner, name, before == "before")
mlxdet.resume(where)
"""


# The checkpoints at 20, 25, 40, 50 are there before the rollback from 60 to 40 (which removes 50).
@pytest.mark.parametrize(
    ("point", "left"),
    [("roll-before", 1), ("remove-before", 1), ("remove-after", 1), ("load-before", 1), ("roll-after", 1),
     ("write-after", 130), ("write-after", 150), ("write-after", 165), ("save-after", 5), ("rotate-before", 5)],
)  # fmt: skip
def test_killed_anywhere_around_a_rollback_and_resumed(trained, texts, tmp_path, point, left):
    # A run directory that was made and killed at once, so that every attempt is a resume.
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes((trained["rollback"].path / "run.json").read_bytes())
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    died = subprocess.run([sys.executable, "-c", KILLER, str(run), str(left), point], env=env, capture_output=True)
    assert died.returncode == 9, died.stderr.decode()[-500:]
    resumed = mlxdet.resume(run)
    assert content(resumed) == content(trained["rollback"])
    assert resumed.steps() == trained["rollback"].steps()


def test_a_forgotten_detour_is_caught(trained, texts, tmp_path, monkeypatch):
    # The control of the above: a checkpoint that does not say what it has been through gives other bits.
    from mlxdet.training import checkpoint

    run = mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "run")
    last = run.checkpoints / "00000090"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        (last / name).unlink()
    last.rmdir()
    whole = checkpoint.load
    monkeypatch.setattr(
        checkpoint, "load", lambda *a: checkpoint.replace(whole(*a), past=checkpoint.FRESH), raising=False
    )
    monkeypatch.setattr(checkpoint, "replace", __import__("dataclasses").replace, raising=False)
    with pytest.raises((Fault, UsageError)):
        mlxdet.resume(run.path)


def test_a_fourth_spike_stops_the_run(texts, tmp_path):
    # Rows of steps 60, 55 (on the first detour), 52, 50: each rollback meets another.
    batches, clean = texts[2], texts[0].read_bytes()
    rows = [int(batches.rows(60)[0])] + [int(batches.rows(s, d)[0]) for s, d in ((58, 1), (56, 2), (54, 3))]
    text = poison(clean, rows, tmp_path / "four.txt")
    with pytest.raises(Fault, match=r"step 54: .*It had rolled back at steps 60, 58, 56"):
        mlxdet.train(config(text, on_spike="rollback"), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.steps()[-1] == 53
    assert [e["detour"] for e in run.records("events.jsonl") if e["event"] == "rollback"] == [1, 2, 3]


def test_changing_a_policy_that_decides_at_a_resume_is_refused(trained):
    with pytest.raises(UsageError, match="--on-spike: the run has 'skip', asked for 'warn'"):
        mlxdet.resume(trained["skip"].path, changes={"on_spike": "warn"})


def test_where_a_rollback_goes_and_what_it_changes():
    assert [target(s, (), 20) for s in (1, 19, 20, 39, 40, 59, 60, 61)] == [0, 0, 0, 0, 20, 20, 40, 40]
    assert target(45, (Detour(60, 40),), 20) == 40
    detours = (Detour(60, 40), Detour(90, 60))
    assert [detour_at(detours, s) for s in (40, 41, 60, 61, 90, 91)] == [0, 1, 1, 2, 2, 0]
    assert factor_at(detours, 40, 0.5, 20) == 1.0
    assert factor_at(detours, 41, 0.5, 20) == 0.5
    assert factor_at(detours, 51, 0.5, 20) == 0.75
    assert factor_at(detours, 61, 0.5, 20) == 0.5
    assert factor_at(detours, 500, 0.5, 20) == 1.0


@pytest.mark.parametrize("policy", ["warn", "skip", "stop", "rollback"])
def test_a_nan_stops_before_the_update_and_is_never_saved(texts, tmp_path, monkeypatch, policy):
    from mlxdet.training import trainer

    whole = trainer.Trainer._record

    def planted(self, batch, outcome):
        whole(self, batch, outcome)
        if batch.step == 2:
            name = "blocks.0.mlp.up.weight"
            self.state.weights[name] = self.state.weights[name] * self.mx.array(float("nan"))

    monkeypatch.setattr(trainer.Trainer, "_record", planted)
    with pytest.raises(Fault, match=r"step 3|step 4|not finite") as caught:
        mlxdet.train(config(texts[0], on_spike=policy, save_every=2, steps=12), tmp_path / "run")
    assert "Rows of the batch" in str(caught.value) or "is not finite, so it is not saved" in str(caught.value)
    run = Run(tmp_path / "run")
    for step in run.steps():
        assert all(np.isfinite(w).all() for w in run.load(step).weights.values())
    assert run.steps() in ([], [2])
