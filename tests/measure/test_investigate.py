"""Investigate: each kind of spike, planted, gets its verdict, and the row, weight or step that was planted is named."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import mlxdet
from mlxdet.cli import run as command
from mlxdet.errors import Fault
from mlxdet.measure import faults, verdict
from mlxdet.measure.investigate import investigate
from mlxdet.measure.probe import CONFIRM, Figure, Place, Probe, Without, leave_out
from mlxdet.measure.replay import Replayer
from mlxdet.training import checkpoint
from mlxdet.training.run import Run
from mlxdet.training.spikes import Detector, Limits
from mlxdet.training.step import TrainStep
from tests.measure.test_replay import change, everything

SMALL = {"preset": "nano", "layers": 1, "width": 16, "mlp": 32, "context": 32, "batch": 8, "steps": 100, "val_every": 0,
         "save_every": 20, "keep": 0, "device": "cpu", "max_lr": 1e-2}  # fmt: skip
WIDE = SMALL | {"width": 32, "mlp": 64, "context": 64, "batch": 4}
N, ROW = 93, 2


def train(text, path, **settings):
    return mlxdet.train(mlxdet.TrainConfig.of(data=[str(text)], **settings), path)


def first_spike(run):
    detector = Detector()
    judged = [detector.see(r["step"], r["loss"], r["grad_norm"]) for r in run.records()]
    return next(s.step for s in judged if s)


@pytest.fixture(scope="module")
def clean(text, tmp_path_factory):
    return train(text, tmp_path_factory.mktemp("clean") / "run", **SMALL)


@pytest.fixture
def copy(clean, tmp_path):
    return Run(shutil.copytree(clean.path, tmp_path / "run"))


def poison(text, directory, settings, fill):
    """Train on a text in which one row of step N is overwritten; return the run and where the row is."""
    run = train(text, directory / "rows", **(settings | {"steps": 1, "warmup": 0}))
    at = int(Replayer(run).batches.batch(N).rows[ROW])
    raw = bytearray(text.read_bytes())
    raw[at : at + settings["context"] + 1] = fill(settings["context"] + 1)
    (directory / "poisoned.txt").write_bytes(raw)
    return train(directory / "poisoned.txt", directory / "run", **settings), at


def random_bytes(n):
    return np.random.default_rng(0).integers(0, 256, n, np.uint8).tobytes()


@pytest.mark.parametrize(
    ("settings", "fill"),
    [
        (WIDE | {"batch": 8}, lambda n: b"Q" * n),
        (WIDE, random_bytes),
        (WIDE | {"dropout": 0.1, "batch": 2, "accumulation": 2, "max_lr": 2e-2}, random_bytes),
    ],
    ids=["repeated token", "random bytes", "dropout and accumulation"],
)
def test_a_poisoned_row_is_data_and_is_named(text, tmp_path, capsys, settings, fill):
    run, at = poison(text, tmp_path, settings, fill)
    before = everything(run.path)
    run.acquire()  # as while it is trained
    assert (
        command(["investigate", str(run.path), "--step", str(N), "--json", "--report", str(tmp_path / "r.json")]) == 1
    )
    run.release()
    assert everything(run.path) == before
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert found["verdict"] == "data" and found["together"]["rows"] == [ROW] and found["first_difference"] is None
    line = (tmp_path / "poisoned.txt").read_bytes()[:at].count(b"\n") + 1
    assert found["causes"] == [f"row {ROW}: {tmp_path / 'poisoned.txt'}, line {line}, byte {at} (token {at})"]
    assert found["without"][0]["rows"] == [ROW] and len(found["without"]) == settings["batch"] * settings.get(
        "accumulation", 1
    )
    worst = found["rows"][0]
    assert (worst["row"], worst["token"], worst["line"]) == (ROW, at, line)
    assert [p["name"] for p in found["places"]] == ["before the step", "20 steps earlier", "another init seed"]
    assert all(p["batch"]["reason"] for p in found["places"])


def test_a_bad_weight_in_a_checkpoint_is_state_and_is_named(copy, capsys):
    """Trained to step 60, one weight multiplied by 1000, and trained on from there."""
    for step in (80, 100):
        shutil.rmtree(checkpoint.directory(copy.checkpoints, step))
    log = copy.path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(True)[:60]))
    saved, name = copy.load(60), "token_embedding.weight"
    weights = saved.weights | {name: saved.weights[name].copy()}
    weights[name][101, 3] *= 1e3
    shutil.rmtree(checkpoint.directory(copy.checkpoints, 60))
    checkpoint.save(copy.checkpoints, replace(saved, weights=weights), copy.recipe)
    run = mlxdet.resume(copy.path)
    for step in (61, 66):
        found = investigate(run, step)
        assert found.verdict == "state" and found.first_difference is None
        assert found.places[0].typical.reason and found.places[0].batch.reason is None
        (moved,) = found.lineage["moved"]
        assert (moved["name"], moved["index"], moved["differing"]) == (name, [101, 3], 1)
        assert moved["saved"] == pytest.approx(1e3 * moved["reached"])
        assert len(found.causes) == 1 and f"{name}[101, 3]" in found.causes[0] and found.learning_rates == []
        assert found.tensors[0]["name"] == name
    assert command(["investigate", str(run.path), "--step", "61"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith("state: other batches are high in this state too")
    assert f"{name}[101, 3]" in said


@pytest.mark.parametrize("bit", [27, 30])
def test_a_flipped_bit_of_a_gradient_is_machine(text, tmp_path, monkeypatch, bit):
    """Bit 27 makes the norm large, bit 30 infinite, which stops the training."""
    settings = SMALL | {"batch": 32}  # summed over more tokens, some values are above 2: bit 27 then makes them larger
    with monkeypatch.context() as m:
        m.setattr(TrainStep, "begin", TrainStep.begin)  # so that the fault is undone at the end
        faults.flip_bit(69, bit)
        if bit == 27:
            run = train(text, tmp_path / "run", **settings)
        else:
            with pytest.raises(Fault, match=r"step 69: .*not finite"):
                train(text, tmp_path / "run", **settings)
            run = Run(tmp_path / "run")
    found = investigate(run, 69)
    assert found.verdict == "machine" and found.first_difference[:2] == (69, "grad_norm")
    assert found.logged.reason in ("gradient norm", "not finite") and found.replayed.reason is None
    assert found.repeats_identical == verdict.REPEATS and found.places == []
    assert "the spike does not come again: step 69 does not reproduce: grad_norm was logged as" in found.headline
    if bit == 27:
        later = investigate(run, 75)  # no spike, and still it is said where the log went wrong
        assert later.verdict == "no spike" and later.first_difference[:2] == (69, "grad_norm")


def test_a_forged_number_on_another_machine_is_no_proof(copy):
    change(copy, 90, loss=9.0, loss_hex=(9.0).hex())
    assert investigate(copy, 90).causes == []
    manifest = json.loads((copy.path / "run.json").read_text())
    manifest["environment"]["decides"]["mlx"] = "0.1.2"
    (copy.path / "run.json").write_text(json.dumps(manifest))
    found = investigate(Run(copy.path), 90)
    assert found.verdict == "machine" and found.causes == [
        "the environment is not the run's, so this is no proof of a fault of the machine"
    ]


def test_a_far_too_high_learning_rate_is_state_and_less_of_it_helps(text, tmp_path):
    run = train(text, tmp_path / "run", **(SMALL | {"max_lr": 1.0, "warmup": 100}))
    found = investigate(run, first_spike(run))
    assert found.verdict == "state" and (found.lineage is None or found.lineage["moved"] == [])
    half = found.learning_rates[0]
    assert half["share"] == 0.5 and half["loss"] < found.logged.loss and half["reason"] is None
    assert len(found.causes) == 1 and found.causes[0].startswith("the learning rate is too high: with 0.5 of it")


def test_a_clean_step_is_no_spike(clean, capsys):
    for step in (40, 61, 100):
        assert command(["investigate", str(clean.path), "--step", str(step)]) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[1].startswith("no spike here: loss ") and "to the bit" in said
    assert command(["investigate", str(clean.path), "--step", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["causes"], found["format"]) == ("no spike", [], "mlxdet investigation")
    assert found["logged"]["loss"] == found["replayed"]["loss"] == list(clean.records())[99]["loss"]


def test_a_clean_step_that_does_not_come_again_is_said(copy):
    change(copy, 90, grad_norm=0.51)
    found = investigate(copy, 91)
    assert (
        found.verdict == "no spike" and "but step 90 does not reproduce: grad_norm was logged as 0.51" in found.headline
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--step", "101"], "step 101 is not in the log"),
        (["--step", "20"], "comes too early to be judged: 19 steps"),
        (["--step", "50", "--controls", "19"], "--controls"),
        (["--step", "50", "--spike-factor", "nan"], "--spike-factor"),
    ],
)
def test_wrong_usage_is_exit_2(clean, capsys, args, says):
    assert command(["investigate", str(clean.path), *args]) == 2
    assert says in capsys.readouterr().err


def figure(high):
    return Figure(9.0 if high else 2.0, 1.0, 8.0 if high else 0.0, 0.0, "loss" if high else None)


@pytest.mark.parametrize(
    ("state", "here", "earlier", "sibling", "says"),
    [
        (0, 1, 1, 1, "data"), (1, 0, 0, 0, "state"), (1, 0, 1, 1, "state"), (1, 1, 1, 0, "state"), (1, 1, 1, 1, "both"),
        (0, 1, 1, 0, "both"), (0, 1, 0, 0, "both"), (0, 0, 1, 1, "unclear"), (0, 0, 0, 0, "unclear"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_two_crossed_experiments(state, here, earlier, sibling, says):
    places = [
        Place(name, 9, figure(typical), figure(own), figure(own), 0, 24)
        for name, typical, own in (("before the step", state, here), ("earlier", 0, earlier), ("sibling", 0, sibling))
    ]
    rows = [{"row": i, "file": "a", "line": 1, "offset": 3, "token": 3} for i in range(4)]
    found = verdict.Investigation("run", 10, figure(True), 2.0, 1.0, [], places=places, rows=rows)
    found.together = Without((3,), figure(False))
    verdict.conclude(found)
    assert found.verdict == says and (found.causes != []) == (says in ("data", "both"))
    if says == "both":
        assert ("only together" in found.headline) == (state == 0)


def test_a_row_left_out_is_as_if_it_were_not_there(clean):
    """Against the step's own gradient of the batch without that row, and a row of NaN-making ids cannot reach the rest."""
    replayer = Replayer(clean)
    state = replayer.state(61)
    batch = replayer.batch(state)
    probe = Probe(clean.config, 256, replayer.backend)
    _, whole = replayer.step_fn(state, batch)
    assert probe.measure(state, batch) == pytest.approx((whole.loss.item(), whole.grad_norm.item()), rel=1e-5)
    rest = replace(batch, tokens=np.delete(batch.tokens, 5, axis=1))
    assert probe.measure(state, batch, [5]) == pytest.approx(probe.measure(state, rest), rel=1e-5)
    other = batch.tokens.copy()
    other[0, 5] = 7
    assert probe.measure(state, replace(batch, tokens=other), [5]) == probe.measure(state, batch, [5])
    assert probe.measure(state, replace(batch, tokens=other)) != probe.measure(state, batch)


def test_one_row_of_many_is_found_group_by_group(clean):
    replayer = Replayer(clean)
    state = replayer.state(61)
    batch = replayer.batch(state)
    tokens = np.stack([replayer.corpus.slice(i * 33, i * 33 + 33) for i in range(96)])[None]
    tokens[0, 77] = 1
    many = replace(batch, tokens=tokens, rows=np.arange(96) * 33)
    tried, probe = [], Probe(clean.config, 256, replayer.backend)
    measure = probe.measure
    probe.measure = lambda *args: tried.append(args) or measure(*args)
    found = leave_out(probe, state, many, Limits(None, None, CONFIRM), groups=10)
    assert found[0].rows == (77,) and len(tried) <= 20


@pytest.mark.parametrize(("batch", "bad"), [(8, (1, 6)), (40, (3, 31))])
def test_two_poisoned_rows_are_both_named(tmp_path, batch, bad):
    """Of 40 rows only one group is searched row by row; the second row is in another."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefghijklmnop" * 4000)
    settings = SMALL | {
        "context": 16,
        "batch": batch,
        "steps": 80,
        "spike_window": 20,
        "warmup": 5,
        "spike_factor": 4.0,
    }
    rows = Replayer(train(text, tmp_path / "rows", **(settings | {"steps": 1, "warmup": 0}))).batches.rows(77)
    raw = bytearray(text.read_bytes())
    for i in bad:
        raw[rows[i] : rows[i] + 17] = np.random.default_rng(i).integers(128, 256, 17, np.uint8).tobytes()
    text.write_bytes(raw)
    found = investigate(train(text, tmp_path / "run", **settings), 77)
    assert found.verdict == "data" and sorted(found.together.rows) == list(bad)
    assert sorted(c.split(":")[0] for c in found.causes) == [f"row {i}" for i in bad]


def test_where_no_batch_is_finite_it_is_not_these_rows(text, tmp_path):
    """A learning rate that ruins the model in one step ruins that of another seed too, which proves nothing."""
    with pytest.raises(Fault, match=r"step 2: .*not finite"):
        train(text, tmp_path / "run", **(SMALL | {"max_lr": 1e30, "warmup": 0}))
    found = investigate(Run(tmp_path / "run"), 2)
    assert found.verdict == "state" and [p.name for p in found.places][1:] == ["1 step earlier", "another init seed"]
    assert found.places[1].batch.reason is None and found.places[2].typical.reason == "not finite"
    assert [r["from"] for r in found.learning_rates] == [0, 0, 0]


def test_without_another_state_to_try_the_rows_in_nothing_is_claimed():
    places = [Place("before the step", 9, figure(0), figure(1), figure(1), 0, 24)]
    found = verdict.Investigation("run", 10, figure(True), 2.0, 1.0, [], places=places)
    verdict.conclude(found)
    assert found.verdict == "unclear" and "no other state to try them in" in found.headline


def test_a_step_that_was_skipped_is_skipped_at_other_learning_rates_too(text, tmp_path):
    run, _ = poison(text, tmp_path, WIDE | {"on_spike": "skip", "spike_window": 30}, random_bytes)
    assert next(r["step"] for r in run.records() if r.get("skipped")) == N
    replayer = Replayer(run)
    state = replayer.state(N)
    for _ in replayer.walk(state, N - 1):
        state = _.after
    half = TrainStep(run.config.replace(max_lr=run.config.optim.max_lr / 2), 256, replayer.backend)
    _, after, outcome = replayer.take(state, half)
    assert not outcome.applied.item() and after.past.skipped == 1
