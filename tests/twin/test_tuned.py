"""The trainer's contract for rows, objectives and adapters: same seed, any cadence, kill -9, resume, replay: one run."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import mlxdet
from mlxdet.config import TrainConfig
from mlxdet.data import exercises
from mlxdet.errors import Fault, UsageError
from mlxdet.formats import read_safetensors
from mlxdet.measure.replay import Replayer, replay
from mlxdet.measure.substrate import Substrate, on_substrate
from mlxdet.model import lora
from mlxdet.training import base, reference, trainer
from mlxdet.training.run import Run

SHAPE = {"preset": "nano", "layers": 1, "width": 16, "heads": 2, "context": 32, "mlp": 32}
COMMON = {"batch": 4, "accumulation": 2, "steps": 9, "max_lr": 1e-2, "warmup": 1, "device": "cpu", "val_windows": 6,
          "val_every": 3, "save_every": 0, "keep": 0, "seed": 5, "spike_window": 20}  # fmt: skip
LORA = {"lora_rank": 4, "lora_targets": "qkv,up,down"}
PAIRS = {"data": "pairs"}
FAMILIES = {
    "sft": {"objective": "sft", "dropout": 0.1},
    "sft chatml, cut": {"objective": "sft", "template": "chatml", "truncate": True, "context": 64},
    "sft packed": {"objective": "sft", "packing": True, "neftune_alpha": 5.0},
    "sft packed, bfloat16, default kernels": {"objective": "sft", "packing": True, "dtype": "bfloat16",
                                              "kernels": "default"},
    "sft lora": {"objective": "sft", "base": "", **LORA, "lora_dropout": 0.1},
    "io": {"objective": "sft", "rows": "io", "data": "io"},
    "lm from": {"base": "", "data": "text"},
    "lm lora": {"base": "", "data": "text", **LORA, "dropout": 0.1},
    "dpo": {"objective": "dpo", "base": "", **PAIRS},
    "dpo lora": {"objective": "dpo", "base": "", **PAIRS, **LORA, "dtype": "bfloat16"},
    "orpo": {"objective": "orpo", **PAIRS},
    "simpo lora": {"objective": "simpo", "base": "", **PAIRS, **LORA, "lora_dropout": 0.1},
}  # fmt: skip
REFERRED = [name for name, values in FAMILIES.items() if values.get("objective") == "dpo"]


@pytest.fixture(scope="module")
def files(tmp_path_factory, text):
    where = tmp_path_factory.mktemp("rows")
    exercises.write(where, "reverse", 60, 8, 0)
    rows = [json.loads(line) for line in (where / "reverse.jsonl").read_text().splitlines()]
    io = "".join(json.dumps({"input": r["instruction"], "output": r["response"]}) + "\n" for r in rows)
    (where / "io.jsonl").write_text(io)
    return {
        "sft": where / "reverse.jsonl",
        "pairs": where / "reverse-pairs.jsonl",
        "io": where / "io.jsonl",
        "text": text,
    }


@pytest.fixture(scope="module")
def start(files, tmp_path_factory):
    """A run to start from."""
    values = COMMON | SHAPE | {"objective": "sft", "data": str(files["sft"]), "steps": 6}
    return mlxdet.train(TrainConfig.of(**values), tmp_path_factory.mktemp("start") / "run")


@pytest.fixture(scope="module")
def config(files, start):
    """Return a function: (family, changes) -> its config."""

    def of(family, **changes):
        values = dict(FAMILIES[family])
        values["data"] = str(files[values.get("data", "sft")])
        if "base" in values:
            values["base"] = str(start.path)
        else:
            values = SHAPE | values
        return TrainConfig.of(**(COMMON | values | changes))

    return of


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """Return a function: family -> its uninterrupted run."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = mlxdet.train(config(family), tmp_path_factory.mktemp("whole") / "run")
        return made[family]

    return get


def contents(run, step=9):
    """Return the bytes of all that must be the same in two equal runs."""
    found = [run.path / "metrics.jsonl", *sorted((run.checkpoints / f"{step:08d}").iterdir())]
    found += [p for p in (run.path / "reference.safetensors", run.path / "base.safetensors") if p.exists()]
    return {p.name: p.read_bytes() for p in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_cadence_prefetch_and_a_resume_from_any_step_change_no_bit(family, whole, config, tmp_path):
    want = contents(whole(family))
    run = mlxdet.train(config(family, save_every=2, val_every=2, val_windows=3, prefetch=0), tmp_path / "run")
    assert contents(run) == want
    for step in (8, 9):
        shutil.rmtree(run.checkpoints / f"{step:08d}")
    again = mlxdet.resume(run.path, changes={"prefetch": 4, "save_every": 0})
    assert contents(again) == want
    # The control: another seed is another run.
    other = mlxdet.train(config(family, seed=6), tmp_path / "other")
    assert [r["loss_hex"] for r in other.records()] != [r["loss_hex"] for r in run.records()]


KILLER = """
import os, signal, sys, json
import mlxdet
from mlxdet.config import from_dict
from mlxdet.training import run, reference, base
where, values, at = sys.argv[1], from_dict(json.loads(sys.argv[2]), "x"), sys.argv[3]
left = 1

def dies(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if at == "base":
    base.publish = dies
elif at == "reference":
    reference.save = dies
else:
    write = run.Log.write
    def counted(self, record):
        write(self, record)
        if self.path.name == "metrics.jsonl" and record["step"] == int(at):
            dies()
    run.Log.write = counted
mlxdet.train(values, where)
"""


def killed(config, where, at):
    command = [sys.executable, "-c", KILLER, str(where), json.dumps(config.as_dict()), at]
    done = subprocess.run(command, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()[-500:]


@pytest.mark.parametrize(
    ("family", "at"), [*((f, "5") for f in FAMILIES), ("dpo", "base"), ("sft lora", "base"), ("dpo lora", "reference")]
)
def test_killed_and_resumed_in_another_process(family, at, whole, config, tmp_path):
    killed(config(family, save_every=4), tmp_path / "run", at)
    assert at != "reference" or not (tmp_path / "run" / reference.FILE).exists()
    assert contents(mlxdet.resume(tmp_path / "run")) == contents(whole(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_replayed_to_the_bit(family, whole):
    run = whole(family)
    found = replay(run, 9)
    assert found.reproduced and (found.same, found.logged) == (9, 9)
    # What was looked into adds up to the step: the losses of scored tokens are the loss of tokens.
    losses = found.trace.token_losses
    scored = losses[~np.isnan(losses)]
    line = next(r for r in run.records() if r["step"] == 9)
    assert len(scored) == line.get("scored", losses.size)
    if run.config.tune.objective in ("lm", "sft") and not run.config.model.dropout:
        assert math.fsum(scored.tolist()) / len(scored) == pytest.approx(line["loss"], rel=2e-3)
    assert [t["name"] for t in found.trace.tensors] == sorted(run.load().weights)
    assert len(found.rows) == len(line["rows"]) * (2 if "margin" in line else 1)
    assert all(math.isfinite(r["loss"]) for r in found.rows) and found.worst


@pytest.mark.parametrize("family", ["sft packed", "dpo lora"])
def test_a_step_in_a_process_of_its_own_is_the_same(family, whole, monkeypatch):
    """What `replay --on` does for another device: state, base and batch go to another process and come back."""
    from mlxdet.measure import substrate

    run = whole(family)
    replayer = Replayer(run)
    done = list(replayer.walk(replayer.state(9), 9))[-1]
    own = Substrate.of(run.config)
    there = substrate._in_own_process(own, run, done.before, done.batch, replayer.corpus.vocab_size)
    assert there == {"loss": done.found["loss"], "grad_norm": done.found["grad_norm"]}
    other = dataclasses.replace(own, dtype="float32" if own.dtype == "bfloat16" else "bfloat16")
    row = on_substrate(other, run, replayer.backend, done.before, done.batch, replayer.corpus)
    assert row["loss"] == pytest.approx(there["loss"], rel=0.05) and row["loss"] != there["loss"]


def test_a_replay_catches_a_changed_line(whole, tmp_path):
    run = shutil.copytree(whole("dpo").path, tmp_path / "run")
    log = run / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[4]["margin"] = float(np.nextafter(np.float32(lines[4]["margin"]), np.float32(9)))
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(Run(run), 9)
    assert not found.reproduced and found.first[:2] == (5, "margin")


@pytest.mark.parametrize("family", REFERRED)
def test_policy_equal_to_reference_is_exactly_ln_2_and_margin_0(family, whole):
    run = whole(family)
    first, ln2 = next(run.records()), float(np.float32(math.log(2.0)))
    assert first["loss"] == ln2 and first["loss_hex"] == ln2.hex()
    zeros = ("reward_chosen", "reward_rejected", "margin", "accuracy")
    assert [first[k] for k in zeros] == [0.0] * 4
    validated = next(run.records("validation.jsonl"))
    assert validated["step"] == 0 and [validated[k] for k in zeros] == [0.0] * 4 and validated["loss"] == ln2
    last = list(run.records())[-1]
    assert last["margin"] != 0.0


def test_another_reference_is_not_exactly_zero(config, tmp_path, monkeypatch):
    """The control: values that belong to other rows."""
    compute = reference.compute
    monkeypatch.setattr(reference, "compute", lambda *a: compute(*a)[::-1])
    with pytest.raises((ValueError, Fault)):
        mlxdet.train(config("dpo", val_fraction=0.1), tmp_path / "a")  # rows without a value
    run = mlxdet.train(config("dpo", val_fraction=0.0, steps=8), tmp_path / "run")
    assert next(run.records())["margin"] != 0.0


@pytest.mark.parametrize("family", ["sft packed", "dpo lora"])
def test_a_rollback_reads_other_rows_and_is_replayed(family, config, tmp_path):
    """Learning rate and factor are such that spikes come by themselves."""
    values = {"steps": 32, "on_spike": "rollback", "rollback_steps": 10, "spike_factor": 1.0, "save_every": 10}
    values |= {"max_lr": 0.1, "schedule": "constant", "batch": 1, "val_every": 0}
    runs = []
    for name in ("a", "b"):
        try:
            mlxdet.train(config(family, **values), tmp_path / name)
        except Fault as stopped:
            assert "rolled back" in str(stopped)
        runs.append(Run(tmp_path / name))
    a, b = runs
    lines = list(a.records(branches=True))
    assert a.past().detours and lines == list(b.records(branches=True))
    again = [r for r in lines if r.get("detour")]
    before = {r["step"]: r for r in lines if not r.get("detour")}
    detour = a.past().detours[0]
    moved = [r for r in again if r["detour"] == 1 and r["step"] <= detour.step]
    assert moved and all(r["rows"] != before[r["step"]]["rows"] for r in moved)
    assert replay(a, max(r["step"] for r in a.records())).reproduced


# The base


def test_the_base_stays_frozen_and_only_adapters_are_saved(whole, start):
    run = whole("sft lora")
    digest = lora.base_digest(start.load().weights)
    assert run.base == digest == lora.base_digest(base.load(run))
    state = json.loads((run.checkpoints / "00000009" / "state.json").read_text())
    assert state["base"] == digest
    names = set(read_safetensors(run.checkpoints / "00000009" / "model.safetensors")[0])
    assert names == {
        f"blocks.0.{n}.lora.{side}" for n in ("attention.qkv", "mlp.up", "mlp.down") for side in ("up", "down")
    }
    assert (run.manifest["parameters"], run.manifest["trainable"]) == (
        start.manifest["parameters"], 4 * (16 + 48 + 16 + 32 + 32 + 16))  # fmt: skip


def test_a_base_that_moves_while_training_is_never_saved(config, tmp_path, monkeypatch):
    """The fault: one weight of the frozen base gets a step of the smallest size."""
    whole = trainer.Trainer._record

    def unfreeze(self, batch, outcome):
        whole(self, batch, outcome)
        if batch.step == 3:
            name = "blocks.0.mlp.up.weight"
            moved = np.array(self.state.base[name])
            moved[0, 0] = np.nextafter(moved[0, 0], np.float32(9))
            self.state.base[name] = self.mx.array(moved)

    monkeypatch.setattr(trainer.Trainer, "_record", unfreeze)
    with pytest.raises(Fault, match="the frozen base has changed"):
        mlxdet.train(config("sft lora"), tmp_path / "run")
    assert Run(tmp_path / "run").steps() == []


def stopped(whole, family, tmp_path):
    """A copy of a run that may be changed."""
    return Run(shutil.copytree(whole(family).path, tmp_path / "run"))


def test_a_resume_refuses_another_base(whole, tmp_path):
    run = stopped(whole, "sft lora", tmp_path)
    path = run.path / base.FILE
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"base\.safetensors: not the base this run was started from"):
        mlxdet.resume(run.path)
    path.unlink()
    with pytest.raises(UsageError, match=r"base\.safetensors: missing"):
        mlxdet.resume(run.path)


def test_a_resume_refuses_adapters_of_another_base(whole, tmp_path):
    from mlxdet.training import checkpoint

    run = stopped(whole, "sft lora", tmp_path)
    saved = run.load(9)
    shutil.rmtree(run.checkpoints / "00000009")
    checkpoint.save(run.checkpoints, dataclasses.replace(saved, base="0" * 64), run.recipe)
    with pytest.raises(UsageError, match="its adapters were trained on another base"):
        mlxdet.resume(run.path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"lora_rank": 8}, "--lora-rank: the run has 4, asked for 8"),
     ({"lora_targets": "all"}, "--lora-targets: the run has 'qkv,up,down', asked for 'qkv,out,up,down'"),
     ({"lora_alpha": 1.0}, "--lora-alpha"), ({"base": "elsewhere"}, "--from: the run has"),
     ({"objective": "lm"}, "--objective"), ({"beta": 0.5}, "--beta"), ({"template": "chatml"}, "--template")],
)  # fmt: skip
def test_a_resume_refuses_other_settings(whole, changes, said):
    with pytest.raises(UsageError, match=said):
        mlxdet.resume(whole("sft lora").path, changes=changes)


@pytest.mark.parametrize("key, value", [("lora_rank", 8), ("lora_alpha", 4.0), ("lora_targets", "qkv")])
def test_an_edited_manifest_is_refused(whole, tmp_path, key, value):
    run = stopped(whole, "sft lora", tmp_path)
    manifest = json.loads((run.path / "run.json").read_text())
    manifest["config"]["tune"][key] = value
    (run.path / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="recipe digest does not fit"):
        mlxdet.resume(run.path)


def test_adapters_of_another_rank_or_target_are_listed(whole, tmp_path):
    from mlxdet.training import checkpoint

    for change in ("rank", "name"):
        run = stopped(whole, "sft lora", tmp_path / change)
        saved = run.load(9)
        old = "blocks.0.mlp.up.lora.down"
        new, shape = (old, (8, 16)) if change == "rank" else ("blocks.0.mlp.gate.lora.down", (4, 16))
        trees = [{k: w for k, w in tree.items() if k != old} | {new: np.zeros(shape, np.float32)}
                 for tree in (saved.weights, saved.first, saved.second)]  # fmt: skip
        shutil.rmtree(run.checkpoints / "00000009")
        checkpoint.save(run.checkpoints, dataclasses.replace(saved, weights=trees[0], first=trees[1], second=trees[2]),
                        run.recipe)  # fmt: skip
        with pytest.raises(UsageError, match=r"does not fit the model: .*lora\.down: .* instead of"):
            mlxdet.resume(run.path)


def test_a_damaged_reference_is_refused_and_a_missing_one_computed_again(whole, tmp_path):
    run = stopped(whole, "dpo", tmp_path)
    shutil.rmtree(run.checkpoints / "00000009")
    path = run.path / reference.FILE
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UsageError, match=reference.FILE):
        mlxdet.resume(run.path)
    path.unlink()
    with pytest.raises(UsageError, match="missing; `mlxdet resume"):
        Replayer(run)
    assert contents(mlxdet.resume(run.path)) == contents(whole("dpo"))


# Forks and merges


@pytest.mark.parametrize("family", ["sft lora", "dpo", "dpo lora"])
def test_a_fork_without_a_change_is_the_old_run(family, config, whole, tmp_path):
    parent = mlxdet.train(config(family, save_every=4), tmp_path / "parent")
    run = mlxdet.fork(parent.path, 4, tmp_path / "fork", {})
    assert [r["loss_hex"] for r in run.records()] == [r["loss_hex"] for r in whole(family).records()]
    weights, other = run.load(9).weights, whole(family).load(9).weights
    assert all(np.array_equal(weights[k], other[k]) for k in other)
    with pytest.raises(UsageError, match=r"--lora-rank: a fork goes on with .* their adapters"):
        mlxdet.fork(parent.path, 4, tmp_path / "x", {"lora_rank": 2})


def test_merged_adapters_are_the_model_and_a_base_for_more(whole, config, tmp_path):
    from mlxdet.training.merge import merge

    run = whole("sft lora")
    done = merge(run.path, tmp_path / "m.safetensors")
    merged = {k: t.to_numpy() for k, t in read_safetensors(tmp_path / "m.safetensors")[0].items()}
    frozen, adapters = base.load(run), run.load().weights
    assert set(merged) == set(frozen) and done["digest"] == lora.base_digest(merged)
    stem = "blocks.0.attention.qkv"
    product = adapters[stem + ".lora.up"].astype(np.float64) @ adapters[stem + ".lora.down"].astype(np.float64)
    want = frozen[stem + ".weight"] + 2.0 * product  # alpha is twice the rank
    np.testing.assert_allclose(merged[stem + ".weight"], want, rtol=1e-6, atol=1e-9)
    assert np.array_equal(merged["blocks.0.attention.out.weight"], frozen["blocks.0.attention.out.weight"])
    more = mlxdet.train(config("dpo", base=str(run.path), steps=2), tmp_path / "more")
    assert more.base == done["digest"] and next(more.records())["margin"] == 0.0
    with pytest.raises(UsageError, match="already there; choose another --out, or --overwrite"):
        merge(run.path, tmp_path / "m.safetensors")
    with pytest.raises(UsageError, match="nothing to merge"):
        merge(whole("dpo").path, tmp_path / "n.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors", "more"]


def test_what_does_not_fit_the_base_is_refused_before_anything_is_written(config, start, text, tmp_path):
    from mlxdet.data.tokenizer import train_tokenizer

    model = train_tokenizer((str(text),), 400, str(tmp_path / "t.model"))
    for changes, said in [
        ({"width": 32}, "--width: 32 is asked for, but the model in .* has 16"),
        ({"preset": "small"}, "--layers: 6 is asked for"),
        ({"base": str(tmp_path)}, "not a run"),
        ({"tokenizer": str(model)}, "--tokenizer: not that of .*: it reads bytes"),
        ({"data": ()}, "--data: name a file of rows"),
    ]:
        with pytest.raises(UsageError, match=said):
            mlxdet.train(config("sft lora", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # Asking for what the base has is no contradiction.
    mlxdet.train(config("lm from", width=16, steps=1), tmp_path / "run")


def test_rows_that_cannot_be_read_stop_before_anything_is_written(config, files, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(files["sft"].read_bytes() + b'{"instruction": 3, "response": "x"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:61: field 'instruction' must be a string"):
        mlxdet.train(config("sft", data=str(bad)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run = mlxdet.train(config("sft", steps=1), tmp_path / "run")
    manifest = run.manifest
    assert (manifest["train_rows"], manifest["val_rows"]) == (54, 6)
    files["sft"].rename(tmp_path / "kept")
    try:
        files["sft"].write_bytes((tmp_path / "kept").read_bytes().replace(b"reverse: ", b"Reverse: ", 1))
        with pytest.raises(UsageError, match="not the one this run was trained on"):
            mlxdet.resume(run.path)
    finally:
        (tmp_path / "kept").rename(files["sft"])
