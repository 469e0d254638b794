"""Replay: every logged step comes back to the bit, what differs is named, and a step's trace is what the step did."""

import json
import os
import shutil
import signal
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxdet
from mlxdet.cli import run as command
from mlxdet.errors import Fault, UsageError
from mlxdet.measure.replay import Replayer, replay
from mlxdet.measure.substrate import Substrate, _in_own_process, on_substrate
from mlxdet.training import checkpoint
from mlxdet.training.run import Run
from mlxdet.training.trainer import Quiet
from tests.model.reference import GPT, names

BASE = {"preset": "nano", "layers": 1, "width": 16, "mlp": 32, "context": 16, "batch": 2, "steps": 60, "seed": 7,
        "val_every": 0, "save_every": 16, "keep": 0, "device": "cpu", "max_lr": 1e-2}  # fmt: skip
FAMILIES = {
    "plain": {},
    "dropout, accumulation": {"dropout": 0.2, "accumulation": 3},
    "neftune, epochs": {"neftune_alpha": 5.0, "order": "epochs"},
    "all, bfloat16": {"dropout": 0.1, "accumulation": 2, "neftune_alpha": 5.0, "order": "epochs", "dtype": "bfloat16"},
}


class Interrupt(Quiet):
    """Ctrl-C when step 27 is done; step 28 is under way then."""

    def stepped(self, record, timing):
        if record["step"] == 27:
            os.kill(os.getpid(), signal.SIGINT)


def train(text, path, **changes):
    run = mlxdet.train(mlxdet.TrainConfig.of(data=[str(text)], **(BASE | changes)), path, listener=Interrupt())
    assert run.stopped == "interrupted"
    return mlxdet.resume(path)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    return train(text, tmp_path_factory.mktemp("replay") / "run", save_every=20, accumulation=2)


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run, free to be changed."""
    return Run(shutil.copytree(trained.path, tmp_path / "run"))


def change(run, step, **fields):
    """Change fields of one logged step."""
    path = run.path / "metrics.jsonl"
    records = [json.loads(text) for text in path.read_text().splitlines()]
    records[step - 1].update(fields)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def everything(path):
    return {
        p.relative_to(path): (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns) for p in path.rglob("*")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_run_with_a_resume_in_between_equals_its_log(text, tmp_path, family):
    run = train(text, tmp_path / "run", **FAMILIES[family])
    assert 28 in run.steps() and len(list(run.records())) == 60
    found = replay(run, 60, start=0)
    assert (found.logged, found.same, found.first, found.start) == (60, 60, None, 0) and found.reproduced
    assert found.headline == "60 of 60 logged steps reproduced, to the bit"
    # The sum of what the tokens lost is what the step logged, masks and noise included.
    tolerance = 1e-6 if family != "all, bfloat16" else 1e-5
    losses = found.trace.token_losses.astype(np.float64)
    assert losses.mean() == pytest.approx(found.record["loss"], rel=tolerance)
    rows = [r["loss"] for r in found.rows]
    assert np.mean(rows) == pytest.approx(found.record["loss"], rel=tolerance) and rows == sorted(rows)[::-1]
    assert sum(r["share"] for r in found.rows) == pytest.approx(1.0)


@pytest.mark.parametrize("step", [1, 2, 16, 17, 18, 28, 60])
def test_it_starts_at_the_nearest_checkpoint_before_the_step(trained, step):
    found = replay(trained, step)
    assert found.start == max([s for s in (0, 20, 28, 40) if s < step])
    assert found.reproduced and found.logged == step - found.start
    assert (found.before is None) == (found.start == step - 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss_hex", "0x1.8p+1"), ("loss", 3.0), ("grad_norm", 1.0), ("lr", 0.5), ("batch", "0" * 16), ("rows", [1, 2]),
     ("tokens", 7), ("skipped", True), ("detour", 1), ("unheard_of", 1)],
)  # fmt: skip
def test_the_first_step_and_field_that_do_not_come_back_are_named(copy, field, value):
    if field == "detour":  # a line of a branch that never was
        change(copy, 45, detour=1)
        with pytest.raises(UsageError, match="rollback"):
            replay(copy, 50)
        return
    change(copy, 45, **{field: value})
    found = replay(copy, 50)
    assert not found.reproduced and found.first[:2] == (45, field) and found.first[2] == value
    assert (found.logged, found.same) == (10, 9) and "step 45 did not reproduce" in found.headline
    assert replay(copy, 44).reproduced


def test_one_flipped_bit_of_a_checkpoint_is_seen(copy):
    saved = copy.load(40)
    name = "blocks.0.mlp.up.weight"
    weights = {k: v.copy() for k, v in saved.weights.items()}
    weights[name].reshape(-1).view(np.uint32)[5] ^= 1
    shutil.rmtree(checkpoint.directory(copy.checkpoints, 40))
    checkpoint.save(copy.checkpoints, replace(saved, weights=weights), copy.recipe)
    assert not replay(copy, 50).reproduced
    assert replay(copy, 50, start=20).reproduced


def test_it_writes_nothing_into_the_run_and_needs_no_lock(trained, tmp_path, capsys):
    before = everything(trained.path)
    trained.acquire()  # as a training would
    try:
        assert command(["replay", str(trained.path), "--step", "33", "--trace", str(tmp_path / "t.json")]) == 0
    finally:
        trained.release()
    assert everything(trained.path) == before
    said = capsys.readouterr().out
    assert "5 of 5 logged steps reproduced" in said and "token_embedding.weight" in said
    assert command(["replay", str(trained.path), "--step", "33", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "t.json").read_text())
    assert (printed["format"], printed["version"]) == ("mlxdet step trace", 1)
    assert len(printed["token_losses"]) == 4 and len(printed["tensors"]) == 16


def test_a_trace_never_replaces_a_file_and_never_lies_in_the_run(trained, tmp_path, capsys):
    (tmp_path / "old").write_text("precious")
    for file, says in (
        (tmp_path / "old", "already there"),
        (trained.path / "trace.json", "lies in the run"),
        (tmp_path / "nowhere" / "t.json", "not a directory"),
    ):
        assert command(["replay", str(trained.path), "--step", "3", "--trace", str(file)]) == 2
        assert says in capsys.readouterr().err
    assert (tmp_path / "old").read_text() == "precious"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--step", "61"], "step 61 is not in the log; it has steps 1 to 60"),
        (["--step", "0"], "--step"),
        (["--step", "5", "--from", "5"], "--from: 5 is not before step 5"),
        (["--step", "50", "--from", "33"], "no checkpoint of step 33; it has 20, 28, 40, 60"),
        (["--step", "5", "--detour", "1"], "--detour: 1 is not one of this run's"),
        (["--step", "5", "--device", "metal"], "--device metal"),
    ],
)
def test_wrong_usage_is_exit_2(trained, capsys, args, says):
    assert command(["replay", str(trained.path), *args]) == 2
    assert says in capsys.readouterr().err


def test_a_step_that_differs_is_exit_1(copy, capsys):
    change(copy, 30, grad_norm=9.5)
    assert command(["replay", str(copy.path), "--step", "30"]) == 1
    assert "step 30 did not reproduce: grad_norm was logged as 9.5" in capsys.readouterr().out.replace("\n", " ")


def test_a_changed_text_and_a_damaged_log_are_refused(text, tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_bytes(text.read_bytes())
    run = mlxdet.train(mlxdet.TrainConfig.of(data=[str(mine)], **(BASE | {"steps": 3})), tmp_path / "run")
    raw = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(raw.replace(b'{"step": 2', b'{"stop": 2'))
    assert command(["replay", str(run.path), "--step", "3"]) == 2
    assert "metrics.jsonl:2: not a line of this log" in capsys.readouterr().err
    (run.path / "metrics.jsonl").write_bytes(raw[:-5])  # being written now
    assert command(["replay", str(run.path), "--step", "2"]) == 0
    capsys.readouterr()
    mine.write_bytes(text.read_bytes()[:-1] + b"!")
    assert command(["replay", str(run.path), "--step", "2"]) == 2
    assert "the text is not the one" in capsys.readouterr().err


def test_another_environment_is_said(copy, capsys):
    manifest = json.loads((copy.path / "run.json").read_text())
    manifest["environment"]["decides"]["mlx"] = "0.1.2"
    (copy.path / "run.json").write_text(json.dumps(manifest))
    assert command(["replay", str(copy.path), "--step", "21"]) == 0
    said = capsys.readouterr().out
    assert "not the run's environment" in said and "0.1.2" in said


def test_the_trace_is_what_the_step_did(text, tmp_path):
    """Against the same model in mlx.nn, and against the checkpoints on both sides of the step."""
    run = mlxdet.train(
        mlxdet.TrainConfig.of(data=[str(text)], **(BASE | {"steps": 12, "save_every": 1})), tmp_path / "run"
    )
    found = replay(run, 11)
    before, after = run.load(10), run.load(11)
    record = list(run.records())[10]
    model = GPT(256, 16, 1, 16, 2, 32)
    model.load_weights([(names(1)[k], mx.array(v)) for k, v in before.weights.items()])
    tokens = Replayer(run).batches.batch(11).tokens[0]

    def losses(m):
        return nn.losses.cross_entropy(m(mx.array(tokens[:, :-1])), mx.array(tokens[:, 1:]))

    assert np.allclose(found.trace.token_losses, np.array(losses(model)), rtol=1e-4)
    grads = nn.value_and_grad(model, lambda m: losses(m).mean())(model)[1]
    flat = dict(mlx_flat(grads))
    for t in found.trace.tensors:
        name = t["name"]
        theirs = np.array(flat[names(1)[name]], np.float64)
        assert t["grad_norm"] == pytest.approx(np.linalg.norm(theirs), rel=1e-4, abs=1e-8), name
        assert t["grad_max"] == pytest.approx(np.abs(theirs).max(), rel=1e-3, abs=1e-8), name
        old, new = before.weights[name].astype(np.float64), after.weights[name].astype(np.float64)
        assert t["update_norm"] == pytest.approx(np.linalg.norm(new - old)) and t["shape"] == list(old.shape)
        if np.linalg.norm(old):
            assert t["update_ratio"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
        assert t["m_norm"] == pytest.approx(np.linalg.norm(after.first[name].astype(np.float64)))
        assert t["v_norm"] == pytest.approx(np.linalg.norm(after.second[name].astype(np.float64)))
    total = np.sqrt(sum(t["grad_norm"] ** 2 for t in found.trace.tensors))
    assert total == pytest.approx(record["grad_norm"], rel=1e-5)  # one float32 sum of squares, one float64
    layers = {row["layer"]: row for row in found.trace.layers}
    assert list(layers) == ["embedding", "blocks.0", "norm", "head"] and layers["head"]["grad_norm"] is None
    assert np.sqrt(sum(row["grad_norm"] ** 2 for row in layers.values() if row["grad_norm"])) == pytest.approx(total)
    x = model.tokens(mx.array(tokens[:, :-1])) + model.positions(mx.arange(16))
    streams = [x, model.blocks[0](x)]
    streams += [model.norm(streams[1]), model(mx.array(tokens[:, :-1]))]
    for row, stream in zip(layers.values(), streams, strict=True):
        host = np.array(stream, np.float64)
        assert row["activation_rms"] == pytest.approx(np.sqrt(np.mean(host**2)), rel=1e-4), row["layer"]
        assert row["activation_max"] == pytest.approx(np.abs(host).max(), rel=1e-4), row["layer"]


def mlx_flat(tree):
    from mlx.utils import tree_flatten

    return tree_flatten(tree)


def test_rows_and_tokens_are_placed_in_the_text(trained, text):
    raw = text.read_bytes()
    found = replay(trained, 42)
    logged = list(trained.records())[41]["rows"]
    assert [r["token"] for r in sorted(found.rows, key=lambda r: r["row"])] == logged
    for r in found.rows:
        assert r["offset"] == r["token"] and r["line"] == raw[: r["offset"]].count(b"\n") + 1
        assert r["text"].encode() == raw[r["offset"] : r["offset"] + 17] and r["file"] == str(text)
    losses = found.trace.token_losses
    assert [w["loss"] for w in found.worst] == np.sort(losses.reshape(-1))[::-1][:20].tolist()
    for w in found.worst:
        assert losses[w["row"], w["position"]] == np.float32(w["loss"]) and w["id"] == raw[w["offset"]]
        assert (
            w["target"].encode() == raw[w["offset"] : w["offset"] + 1]
            and w["line"] == raw[: w["offset"]].count(b"\n") + 1
        )
        start = logged[w["row"]]
        assert w["offset"] == start + w["position"] + 1 and w["context"].encode() == raw[start : w["offset"]]


def test_another_substrate_runs_the_same_step(trained, text, tmp_path, capsys):
    args = ["replay", str(trained.path), "--step", "47", "--dtype", "bfloat16", "--kernels", "default", "--json"]
    assert command(args) == 0
    rows = json.loads(capsys.readouterr().out)["substrates"]
    assert [(r["kernels"], r["dtype"], r["note"]) for r in rows] == [
        ("deterministic", "float32", "as the run"), ("default", "float32", ""), ("deterministic", "bfloat16", ""),
        ("default", "bfloat16", ""),
    ]  # fmt: skip
    own, default, half, _ = rows
    assert own["loss"] == list(trained.records())[46]["loss"]
    assert default["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert half["loss"] != own["loss"] and half["loss"] == pytest.approx(own["loss"], rel=1e-2)
    assert command(args[:-1]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_a_substrate_in_a_process_of_its_own_gives_what_it_gives_here(trained):
    replayer = Replayer(trained)
    state = replayer.state(41)
    batch, where = replayer.batch(state), Substrate("cpu", "default", "float32")
    here = on_substrate(where, trained, replayer.backend, state, batch, replayer.corpus)
    there = _in_own_process(where, trained, state, batch, replayer.corpus.vocab_size)
    assert there == {k: here[k] for k in ("loss", "grad_norm")}
    with pytest.raises(UsageError, match="metal"):
        _in_own_process(Substrate("metal", "default", "float32"), trained, state, batch, 256)


def test_a_step_that_stopped_a_run_for_not_being_finite_is_replayed(copy, capsys):
    for step in (40, 60):
        shutil.rmtree(checkpoint.directory(copy.checkpoints, step))
    (copy.path / "metrics.jsonl").write_text("".join((copy.path / "metrics.jsonl").read_text().splitlines(True)[:28]))
    saved = copy.load(28)
    shutil.rmtree(checkpoint.directory(copy.checkpoints, 28))
    weights = saved.weights | {"norm.weight": np.full_like(saved.weights["norm.weight"], 3e38)}
    checkpoint.save(copy.checkpoints, replace(saved, weights=weights), copy.recipe)
    with pytest.raises(Fault, match="not finite"):
        mlxdet.resume(copy.path)
    assert command(["replay", str(copy.path), "--step", "29", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["same"] == found["logged"] == 1 and found["record"]["loss"] in ("nan", "inf")
    assert command(["replay", str(copy.path), "--step", "29"]) == 0


@pytest.fixture(scope="module")
def poisoned(text, tmp_path_factory):
    """A text with one row that spikes where step 44 reads it, in a run of other data order, and that row."""
    directory = tmp_path_factory.mktemp("poisoned")
    config = mlxdet.TrainConfig.of(data=[str(text)], **(BASE | {"batch": 4, "context": 32}))
    run = mlxdet.train(config.replace(steps=1, warmup=0), directory / "rows")
    row = Replayer(run).batches.batch(44).rows[1]
    raw = bytearray(text.read_bytes())
    raw[row : row + 33] = b"Q" * 33
    (directory / "text.txt").write_bytes(raw)
    return directory, config.replace(data=(str(directory / "text.txt"),), spike_window=30, spike_factor=5.0)


def test_skipped_steps_are_skipped_again(poisoned):
    directory, config = poisoned
    run = mlxdet.train(config.replace(on_spike="skip"), directory / "skip")
    skipped = [r["step"] for r in run.records() if r.get("skipped")]
    assert skipped == [44]
    found = replay(run, 60, start=0)
    assert (found.logged, found.same) == (60, 60)
    change(run, 44, skipped=None)
    assert replay(run, 60, start=0).first == (44, "skipped", None, True)


def test_a_run_with_a_rollback_is_replayed_on_each_branch(poisoned):
    directory, config = poisoned
    run = mlxdet.train(config.replace(on_spike="rollback", rollback_steps=10, rollback_ramp=20), directory / "back")
    events = [json.loads(e) for e in (run.path / "events.jsonl").read_text().splitlines()]
    rollbacks = [e for e in events if e["event"] == "rollback"]
    assert (rollbacks[0]["step"], rollbacks[0]["to"]) == (44, 30)
    now = replay(run, 60, start=0)
    assert (now.logged, now.same) == (60, 60) and replay(run, 60).reproduced
    for branch, back in enumerate(rollbacks):
        then = replay(run, back["step"], branch=branch, start=0)
        assert then.logged == then.same == back["step"]
        assert replay(run, back["step"]).record["rows"] != then.record["rows"]
        with pytest.raises(UsageError, match="not in the log"):
            replay(run, back["step"] + 1, branch=branch)
    assert replay(run, 44, branch=0).record["batch"] == next(
        r["batch"] for r in run.records(branches=True) if r["step"] == 44
    )
    later = Run(run.path).load()  # a checkpoint of the newest branch
    assert len(later.past.detours) > 0
    at = min(s for s in run.steps() if run.load(s).past.detours)
    with pytest.raises(UsageError, match=f"--from: the checkpoint of step {at} is of a later branch"):
        replay(run, 44, branch=0, start=at)


def test_a_rollback_between_two_reads_of_the_logs_is_no_damage(poisoned, monkeypatch):
    """The run rolls back while it is read: what was read first decides, and no line is of a rollback not known yet."""
    from mlxdet.measure import history as reading
    from mlxdet.training import run as runs

    directory, config = poisoned
    run = mlxdet.train(config.replace(steps=30), directory / "live")
    whole, read = runs.lines, []

    def lines(path):
        found = whole(path)
        read.append(path.name)
        if len(read) == 1:
            with (run.path / "events.jsonl").open("a") as events, (run.path / "metrics.jsonl").open("a") as metrics:
                events.write(json.dumps({"event": "rollback", "step": 30, "to": 20, "detour": 1}) + "\n")
                metrics.write(json.dumps({**next(run.records()), "step": 21, "detour": 1}) + "\n")
        return found

    monkeypatch.setattr(runs, "lines", lines)
    monkeypatch.setattr(reading, "lines", lines)
    now = reading.history(run)
    assert read[0] == "metrics.jsonl" and sorted(now.records) == list(range(1, 31)) and now.branch == 0


def test_a_text_that_was_moved_is_found_with_data(text, tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_bytes(text.read_bytes())
    run = mlxdet.train(mlxdet.TrainConfig.of(data=[str(mine)], **(BASE | {"steps": 30})), tmp_path / "run")
    moved = mine.rename(tmp_path / "moved.txt")
    for verb in ("replay", "investigate"):
        args = [verb, str(run.path), "--step", "28"]
        assert command(args) == 2
        assert "mine.txt: no such file" in capsys.readouterr().err
        assert command([*args, "--data", str(moved)]) == 0
        capsys.readouterr()
        assert command([*args, "--data", __file__]) == 2
        assert "the text is not the one" in capsys.readouterr().err
