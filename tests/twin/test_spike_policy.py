"""What `--on-spike` does at a spike: bits that do not change where they must not, and runs that survive any kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mlxdet
from mlxdet.cli import run as command
from mlxdet.config import TrainConfig
from mlxdet.data import open_corpus
from mlxdet.errors import Fault, UsageError
from mlxdet.formats import read_safetensors
from mlxdet.seeds import Splitmix64, stream
from mlxdet.training.corpora import text_batches
from mlxdet.training.detours import Detour, detour_at, factor_at, target
from mlxdet.training.run import Run
from mlxdet.training.schedule import learning_rate
from mlxdet.training.trainer import Quiet

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
    # The control of the above: a checkpoint that does not say what it has been through does not fit the log.
    from mlxdet.training import checkpoint

    run = mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "run")
    last = run.checkpoints / "00000090"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        (last / name).unlink()
    last.rmdir()
    whole = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *a: replace(whole(*a), past=checkpoint.FRESH))
    with pytest.raises(UsageError, match="does not hold every step up to 80"):
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


@pytest.mark.parametrize("cadence", [{}, {"save_every": 1, "val_every": 1, "keep": 1}], ids=["seldom", "each step"])
@pytest.mark.parametrize("policy", ["warn", "skip", "stop", "rollback"])
def test_a_nan_stops_before_the_update_and_is_never_saved(texts, tmp_path, monkeypatch, policy, cadence):
    """A weight is made NaN after step 2: it stops in step 3, however often it saves or validates."""
    from mlxdet.training import trainer

    whole = trainer.Trainer._record

    def planted(self, batch, outcome):
        whole(self, batch, outcome)
        if batch.step == 2:
            name = "blocks.0.mlp.up.weight"
            self.state.weights[name] = self.state.weights[name] * self.mx.array(float("nan"))

    monkeypatch.setattr(trainer.Trainer, "_record", planted)
    options = {"save_every": 2, "val_every": 2, "steps": 12} | cadence
    with pytest.raises(Fault, match=r"^step 3: loss nan, gradient norm nan: not finite") as caught:
        mlxdet.train(config(texts[0], on_spike=policy, **options), tmp_path / "run")
    run = Run(tmp_path / "run")
    detour = 3 if policy == "rollback" else 0
    assert f"Rows of the batch: {texts[2].rows(3, detour).tolist()}" in str(caught.value)
    assert run.steps() == ([1] if cadence else [])
    for step in run.steps():
        assert all(np.isfinite(w).all() for w in run.load(step).weights.values())
    assert all(r["step"] < 3 and np.isfinite(r["loss"]) for r in [*run.records(), *run.records("validation.jsonl")])


def test_a_damaged_checkpoint_is_seen_before_a_rollback_takes_anything_away(texts, tmp_path):
    class Damage(Quiet):
        def spiked(self, spike, action):
            file = tmp_path / "run" / "checkpoints" / "00000040" / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(UsageError, match=r"00000040/model\.safetensors: damaged"):
        mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "run", listener=Damage())
    run = Run(tmp_path / "run")
    assert run.steps() == [20, 25, 40, 50] and run.past().detours == ()


@pytest.mark.parametrize("spikes_again", [True, False])
def test_an_inexact_resume_from_before_a_rollback(trained, tmp_path, monkeypatch, spikes_again):
    """It takes the rollback again or, in an environment where there is no spike, does not; the logs agree with that."""
    from mlxdet.measure.replay import replay
    from mlxdet.training import spikes

    path = Path(shutil.copytree(trained["rollback"].path, tmp_path / "run"))
    for step in (50, 60, 75, 80, 90):
        shutil.rmtree(path / "checkpoints" / f"{step:08d}")
    manifest = json.loads((path / "run.json").read_text())
    manifest["environment"]["decides"]["mlx"] = "0.1.2"
    (path / "run.json").write_text(json.dumps(manifest))
    with monkeypatch.context() as m:
        if not spikes_again:
            m.setattr(spikes.Limits, "thresholds", lambda self: (float("inf"),) * 4)
        run = mlxdet.resume(path, inexact=True)
    assert run.past().detours == ((Detour(60, 40),) if spikes_again else ())
    assert [r["step"] for r in run.records()] == list(range(1, 91))
    found = replay(run, 90, start=0)
    assert (found.logged, found.same) == (90, 90)
    assert command(["batches", str(path), "--step", "50", "--detour", "1"]) == (0 if spikes_again else 2)


def test_an_interrupt_in_the_same_turn_as_a_rollback(trained, texts, tmp_path):
    class Interrupt(Quiet):
        def spiked(self, spike, action):
            os.kill(os.getpid(), signal.SIGINT)

    run = mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "run", listener=Interrupt())
    assert (run.stopped, run.steps()) == ("interrupted", [20, 25, 40, 41])
    assert content(mlxdet.resume(run.path)) == content(trained["rollback"])


@pytest.mark.parametrize("lines", [1, 2, 5])
def test_a_full_disk_around_a_rollback(trained, texts, tmp_path, monkeypatch, lines):
    """After the spike so many lines of a log still fit, and half of one more."""
    from mlxdet.training import run as runs

    left = []

    class Spiked(Quiet):
        def spiked(self, spike, action):
            left[:] = left or [lines]

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if left and (left.append(left.pop() - 1) or left[0] < 0):
                self.file.write(data[: len(data) // 2])
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    whole = runs.Log.__init__

    def log(self, path, keyed):
        whole(self, path, keyed)
        self._file = Full(self._file)

    with monkeypatch.context() as m:
        m.setattr(runs.Log, "__init__", log)
        with pytest.raises(Fault, match="the disk is full; the last good checkpoint is untouched"):
            mlxdet.train(config(texts[1], on_spike="rollback"), tmp_path / "run", listener=Spiked())
    assert content(mlxdet.resume(tmp_path / "run")) == content(trained["rollback"])


def test_a_policy_without_detection_is_refused_at_a_resume_too(trained, texts, tmp_path):
    without = mlxdet.train(config(texts[0], steps=5, spike_detect=False), tmp_path / "run")
    for run, changes in (
        (trained["stop"], {"spike_detect": False}),
        (without, {"on_spike": "stop"}),
        (without, {"on_spike": "skip"}),
    ):
        with pytest.raises(UsageError, match="--no-spike-detect: --on-spike"):
            mlxdet.resume(run.path, changes=changes)


@pytest.mark.parametrize(
    ("log", "old", "new", "line"),
    [
        ("metrics.jsonl", '{"step": 7, "loss"', '{"step": 7, "lost"', 7),
        ("metrics.jsonl", '{"step": 7,', '{"step": "7",', 7),
        ("metrics.jsonl", '{"step": 7,', "[", 7),
        ("metrics.jsonl", '"detour": 1}', '"detour": "1"}', 61),
        ("validation.jsonl", '{"step": 30', '{"stop": 30', 2),
        ("events.jsonl", '"to": 40', '"too": 40', 7),
        ("events.jsonl", '{"event": "save"', '"save"', 2),
    ],
)
def test_a_log_that_was_edited_is_named_by_line(trained, tmp_path, capsys, log, old, new, line):
    run = Path(shutil.copytree(trained["rollback"].path, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "00000090")
    text = (run / log).read_text()
    (run / log).write_text(text.replace(old, new, 1))
    verbs = ["resume"] if log == "metrics.jsonl" or log == "validation.jsonl" else []
    for verb in [*verbs, *(["replay", "investigate", "batches"] if log != "validation.jsonl" else [])]:
        assert command([verb, str(run), *([] if verb == "resume" else ["--step", "70"])]) == 2, verb
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{log}:{line}: not a line of this log; the file was changed" in said, verb


def test_nothing_is_looked_into_unless_asked_for(texts, tmp_path):
    """Per-row losses and norms are in modules that a training does not even import, spike or not."""
    code = """
import sys, mlxdet
from mlxdet.cli import run as command
from mlxdet.config import TrainConfig
run = mlxdet.train(TrainConfig.of(**eval(sys.argv[1])), sys.argv[2])
assert any(e["event"] == "spike" for e in run.records("events.jsonl"))
sys.exit(any(name.startswith("mlxdet.measure") for name in sys.modules))
"""
    options = {"data": (str(texts[1]),), **RECIPE, "steps": 61}
    done = subprocess.run([sys.executable, "-c", code, repr(options), str(tmp_path / "run")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]
