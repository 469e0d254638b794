"""`mlxdet diverge` finds the first step and stage of a planted difference, its size and its cause; and never calls
identical what it has not compared."""

import copy
import dataclasses
import json
import math
import random
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

import mlxdet
from mlxdet.cli import run as cli
from mlxdet.config import FIELDS, TrainConfig
from mlxdet.errors import UsageError
from mlxdet.formats import FormatError
from mlxdet.measure.causes import causes
from mlxdet.measure.divergence import diverge
from mlxdet.measure.lines import Number, distance, relative, same
from mlxdet.measure.records import STRETCHES, compare_records
from mlxdet.training import checkpoint
from mlxdet.training.detours import Detour, Past
from tests.conftest import mlxdet as command_line

# ---- hand-made runs: nine steps, checkpoints at 3, 6 and 9, validations at 0 and 6

CONFIG = TrainConfig.of(preset="nano", steps=9, seed=7).resolve().as_dict()
MANIFEST = {
    "format": 1,
    "config": CONFIG,
    "recipe": "r",
    "argv": ["mlxdet", "train"],
    "corpus": {"kind": "bytes", "tokens": 500, "vocab": 256, "digest": "c0ffee", "files": [{"name": "a.txt", "bytes": 500, "sha256": "00"}]},
    "environment": {
        "decides": {"device": "cpu", "mlx": "0.32.4", "blas": {"name": "openblas", "version": "0.3.30", "threads": 1}, "variables": {}},
        "notes": {"python": "3.11.7"},
    },
    "code": {"version": "0.1.0", "source": "aa", "commit": "11", "dirty": False},
}  # fmt: skip
WEIGHTS = {
    "head.bias": np.linspace(-1, 1, 4).astype(np.float32),
    "token_embedding.weight": np.linspace(0.5, 2, 32).reshape(8, 4).astype(np.float32),
}


def metrics(steps=9):
    return [
        {"step": s, "loss": 5.0 - s / 8, "loss_hex": (5.0 - s / 8).hex(), "grad_norm": 1.5 + s / 16, "lr": 1e-3 * s,
         "tokens": 128 * s, "batch": f"{s:016x}", "rows": [s, 10 * s, 100 * s]}
        for s in range(1, steps + 1)
    ]  # fmt: skip


def snapshot(step):
    return checkpoint.Snapshot(
        {n: w + np.float32(step) for n, w in WEIGHTS.items()},
        {n: w * np.float32(0.5) for n, w in WEIGHTS.items()},
        {n: w * w for n, w in WEIGHTS.items()},
        step,
    )


def write_lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def make(path, records=None, states=None, manifest=None, validation=None, events=()):
    """Write a run directory; `states` are Snapshots."""
    path.mkdir()
    (path / "run.json").write_text(json.dumps(MANIFEST if manifest is None else manifest))
    write_lines(path / "metrics.jsonl", metrics() if records is None else records)
    if validation is None:
        validation = [{"step": s, "loss": 4.5, "loss_hex": (4.5).hex(), "windows": 8} for s in (0, 6)]
    write_lines(path / "validation.jsonl", validation)
    write_lines(path / "events.jsonl", [{"event": "start", "time": path.name, "step": 0}, *events])
    for state in [snapshot(s) for s in (3, 6, 9)] if states is None else states:
        checkpoint.save(path / "checkpoints", state, "r")
    return path


@pytest.fixture
def twin(tmp_path):
    """Return a function: make runs a (untouched) and b (with the arguments given), and diverge them."""

    def both(a=None, **b):
        return diverge(make(tmp_path / "a", **(a or {})), make(tmp_path / "b", **b))

    return both


def changed(step, **fields):
    records = metrics()
    records[step - 1] |= fields
    return records


def ulp(x):
    return math.nextafter(x, math.inf)


def moved(step, *, weights=(), first=(), second=()):
    """A snapshot of `step` whose named tensors have their first slot one float32 ulp up."""
    state = copy.deepcopy(snapshot(step))
    for names, tree in ((weights, state.weights), (first, state.first), (second, state.second)):
        for name in names:
            tree[name].flat[0] = np.nextafter(tree[name].flat[0], np.float32(np.inf))
    return state


def test_equal_runs_are_identical_and_what_was_compared_is_counted(twin):
    found = twin()
    assert found.verdict == "identical" and found.first is None and found.notes == []
    told = found.as_dict()
    assert told["compared"]["records"] == 9 and told["validation"]["records"] == 2
    assert [c["step"] for c in told["checkpoints"]] == [3, 6, 9] and all(c["identical"] for c in told["checkpoints"])
    assert "3 common checkpoints; 2 common validations" in found.headline


PLANTED = {
    "rows": {"rows": [5, 50, 501]},
    "batch": {"batch": "f" * 16},
    "loss": {"loss_hex": ulp(5.0 - 5 / 8).hex()},
    "grad_norm": {"grad_norm": ulp(1.5 + 5 / 16)},
    "lr": {"lr": ulp(1e-3 * 5)},
}


@pytest.mark.parametrize("stage", PLANTED)
def test_a_difference_planted_in_a_stage_is_found_there(twin, stage):
    found = twin(records=changed(5, **PLANTED[stage]))
    assert (found.first.step, found.first.stage) == (5, stage) and found.verdict == "differs"
    assert list(found.first.fields) == list(PLANTED[stage])
    assert "step 5" in found.headline and found.headline.startswith("no recorded cause (same seeds, config, text, code")


@pytest.mark.parametrize("earlier", PLANTED)
def test_of_several_stages_in_one_step_the_first_computed_is_named(twin, earlier):
    stages = list(PLANTED)
    later = stages[stages.index(earlier) :]
    fields = {k: v for stage in reversed(later) for k, v in PLANTED[stage].items()}  # written in the wrong order
    found = twin(records=[*changed(5, **fields)[:6], *changed(7, rows=[0])[6:]])
    assert (found.first.step, found.first.stage) == (5, earlier)


def test_one_ulp_that_four_decimals_hide_is_measured_exactly(twin):
    x = 5.0 - 5 / 8
    y = ulp(x)
    assert f"{x:.4f}" == f"{y:.4f}"
    found = twin(records=changed(5, loss=y, loss_hex=y.hex()))
    seen = found.first.fields["loss_hex"]
    assert (seen["a"], seen["b"]) == (f'"{x.hex()}"', f'"{y.hex()}"') and (seen["line_a"], seen["line_b"]) == (5, 5)
    assert seen["absolute"] == float(Fraction(y) - Fraction(x)) == 2.0**-50
    assert seen["relative"] == float((Fraction(y) - Fraction(x)) / Fraction(x))
    assert found.first.stage == "loss" and found.log.fields["loss"].differing == 1
    assert found.log.fields["loss"].equal_again == 4  # steps 6 to 9


def test_a_forward_difference_is_certain_only_where_the_weights_before_it_were_seen(twin):
    found = twin(records=changed(4, **PLANTED["loss"]))
    assert found.first.certain and "checkpoint 3) are identical" in found.first.reading


@pytest.mark.parametrize(
    "step, said",
    [
        (1, "initial weights"),
        (2, "no checkpoint before it"),
        (6, "the update of steps 4 to 5"),
        (5, "the update of step 4 "),
    ],
)
def test_what_the_log_cannot_show_is_said(twin, step, said):  # fmt: skip
    found = twin(records=changed(step, **PLANTED["grad_norm"]))
    assert not found.first.certain and said in found.first.reading and "visible" in found.headline


def test_weights_that_differ_before_anything_logged_does_come_first(twin):
    found = twin(
        records=changed(8, **PLANTED["loss"]), states=[snapshot(3), moved(6, weights=["head.bias"]), snapshot(9)]
    )
    assert (found.first.step, found.first.stage) == (6, "weights") and not found.first.certain
    assert "still identical at checkpoint 3, differ at 6" in found.first.reading
    assert "an update of steps 4 to 6" in found.first.reading and "weights of head.bias" in found.first.reading
    tensor = found.first.tensors[0]
    a, b = (
        snapshot(6).weights["head.bias"].astype(np.float64),
        moved(6, weights=["head.bias"]).weights["head.bias"].astype(np.float64),
    )
    assert (tensor["name"], tensor["differing"], tensor["slots"]) == ("head.bias", 1, 4)
    assert tensor["relFro"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
    assert [c["identical"] for c in found.as_dict()["checkpoints"]] == [True, False, True]


def test_the_log_of_a_step_comes_before_its_checkpoint(twin):
    states = [snapshot(3), moved(6, first=["token_embedding.weight"], weights=["token_embedding.weight"])]
    found = twin(records=changed(6, **PLANTED["grad_norm"]), states=states)
    assert (found.first.step, found.first.stage) == (6, "grad_norm")
    assert "moved most by step 6: first moments of token_embedding.weight.m" in found.first.reading
    assert [t["group"] for t in found.first.tensors] == ["first moments", "weights"]


@pytest.mark.parametrize(
    "kind, said", [("first", "so the backward pass"), ("second", "the update itself"), ("weights", "the update itself")]
)
def test_moments_tell_backward_from_update(twin, kind, said):  # fmt: skip
    states = [snapshot(3), moved(4, **{kind: ["head.bias"]})]
    found = twin(a={"states": [snapshot(3), snapshot(4)]}, states=states)
    assert (found.first.step, found.first.stage, found.first.certain) == (4, "weights", True)
    assert said in found.first.reading


def test_tensors_that_only_one_checkpoint_has_are_no_pass(twin):
    state = snapshot(9)
    states = [snapshot(3), snapshot(6), dataclasses.replace(state, **{
        part: {k: v for k, v in getattr(state, part).items() if k != "head.bias"} for part in ("weights", "first", "second")})]  # fmt: skip
    found = twin(states=states)
    assert (found.first.step, found.first.stage) == (9, "weights")
    assert found.as_dict()["checkpoints"][-1]["weights"]["missing"] == ["head.bias"]


def test_a_validation_sees_weights_that_nothing_else_saw(twin):
    validation = [{"step": s, "loss": 4.5, "loss_hex": (4.5).hex(), "windows": 8} for s in (0, 6)]
    validation[0] |= {"loss_hex": ulp(4.5).hex()}
    found = twin(validation=validation)
    assert (found.first.step, found.first.stage, found.first.certain) == (0, "validation", False)


def test_another_cadence_of_validation_and_saving_is_no_difference(twin):
    validation = [{"step": s, "loss": 4.5, "loss_hex": (4.5).hex(), "windows": 8} for s in (0, 3, 6)]
    validation[1] = {"step": 3, "loss": 1.0, "loss_hex": (1.0).hex(), "windows": 99}
    found = twin(validation=validation, states=[snapshot(2), snapshot(9)])
    assert found.identical and found.validation.common == 2
    assert (found.only_a, found.only_b, [c.step for c in found.checkpoints]) == ([3, 6], [2], [9])


def test_without_a_common_checkpoint_identical_says_that_weights_were_not_compared(twin):
    found = twin(states=[])
    assert (
        found.identical and "weights NOT compared" in found.headline and "weights were NOT compared" in found.notes[0]
    )


def test_weights_after_the_last_common_checkpoint_are_not_claimed(twin):
    assert "weights after it were not compared" in twin(states=[snapshot(3)]).notes[0]


def test_a_shorter_run_is_reported_as_shorter_and_is_not_identical(twin):
    found = twin(
        records=metrics(7),
        states=[snapshot(3), snapshot(6)],
        events=[{"event": "stop", "step": 7, "reason": "interrupted"}],
    )
    assert found.verdict == "differs" and (found.first.stage, found.first.step) == ("length", 8)
    assert "B stops at step 7, A goes on to step 9; equal where both have records" in found.headline
    assert "B: stop at step 7, interrupted" in found.notes


def test_a_difference_is_found_before_the_length(twin):
    found = twin(records=changed(4, **PLANTED["loss"])[:7])
    assert (found.first.stage, found.first.step) == (
        "loss",
        4,
    ) and "B stops at step 7, A goes on to step 9" in found.notes


def test_a_step_missing_in_between_is_a_difference(twin):
    records = metrics()
    del records[4]
    found = twin(records=records)
    assert (found.first.stage, found.first.step, found.first.reading) == ("records", 5, "A has step 5, B has not")


@pytest.mark.parametrize("step", ["5", 5.5, None])
def test_a_step_that_is_no_whole_number_is_refused(twin, step):
    with pytest.raises(FormatError, match=r"metrics\.jsonl"):
        records = metrics()
        records[4]["step"] = step
        twin(a={"records": records}, records=[r | {"loss": 0.0} if r["step"] == step else r for r in records])


def test_a_length_has_the_number_of_steps_as_its_cause_and_nothing_else(tmp_path):
    a = make(tmp_path / "a")
    b = make(
        tmp_path / "b",
        records=metrics(7),
        states=[snapshot(3)],
        manifest=manifest(config__optim__steps=7, code__source="x"),
    )
    assert diverge(a, b).headline.startswith("different config: steps 9 / 7; B stops at step 7")
    c = make(tmp_path / "c", records=metrics(7), states=[snapshot(3)], manifest=manifest(environment__decides__mlx="x"))
    assert diverge(a, c).headline.startswith("B stops at step 7")


def test_a_torn_last_line_is_reported_and_no_traceback(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    whole = (b / "metrics.jsonl").read_bytes()
    for cut in (1, 2, 40):
        (b / "metrics.jsonl").write_bytes(whole[: -1 - cut])
        found = diverge(a, b)
        assert "B stops at step 8 (its last line is cut off), A goes on to step 9" in found.headline
        assert any(":9: the last line is cut off" in note for note in found.notes)
    (b / "metrics.jsonl").write_bytes(whole[:-1])  # only the line's end is missing: the record is whole
    assert diverge(a, b).identical
    (b / "metrics.jsonl").write_bytes(whole + b'{"step": 10, "lo')
    assert diverge(a, b).first.stage == "length" and diverge(b, a).first.stage == "length"


@pytest.mark.parametrize(
    "a, b", [([], []), ([], None), (None, []), (None, [{"step": 20, "loss": 1.0}]), (None, [{"step": 1, "other": 1}])]
)
def test_nothing_to_compare_is_never_identical(twin, a, b, tmp_path):  # fmt: skip
    with pytest.raises(UsageError, match="nothing to compare"):
        twin(a={"records": a}, records=b)
    assert cli(["diverge", str(tmp_path / "a"), str(tmp_path / "b")]) == 2


def test_what_is_no_run_or_damaged_is_refused_by_name(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    for other, said in (
        (tmp_path / "none", "no such run"),
        (tmp_path / "empty", "empty: not a run"),
        (a / "run.json", "a directory and a file"),
    ):
        with pytest.raises(UsageError, match=said):
            diverge(a, other)
    with pytest.raises(UsageError, match="--key"):
        diverge(a, b, ["step"])
    for text in (
        "",
        "[]",
        '{"config": {}}',
        json.dumps(MANIFEST | {"environment": {"decides": 3}}),
        json.dumps(MANIFEST | {"config": {"x": 1}}),
        "[" * 10**5,
    ):
        (b / "run.json").write_text(text)
        with pytest.raises(UsageError, match=r"b/run\.json: damaged"):
            diverge(a, b)
    (b / "run.json").write_text(json.dumps(MANIFEST))
    model = b / "checkpoints" / "00000006" / "model.safetensors"
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(raw)
    with pytest.raises(FormatError, match=r"00000006/model\.safetensors.*damaged"):
        diverge(a, b)
    (b / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="b: nothing to compare"):
        diverge(a, b)


def test_a_run_against_itself_is_said_to_be_that(tmp_path):
    a = make(tmp_path / "a")
    assert diverge(a, a).identical and "compares a file with itself" in diverge(a, a).notes[0]


def test_a_rollback_is_compared_branch_by_branch(tmp_path):
    def detour(*records):
        return [*metrics(6), *(r | {"detour": 1} for r in metrics()[3:]), *records]

    a, b = make(tmp_path / "a", records=detour()), make(tmp_path / "b", records=detour())
    assert diverge(a, b).identical and diverge(a, b).log.common == 12
    records = detour()
    records[8] |= PLANTED["loss"]  # step 6 of the detour; step 6 of the branch it left is the same
    write_lines(b / "metrics.jsonl", records)
    found = diverge(a, b)
    assert (found.first.at, found.first.step, found.first.stage) == ("detour 1, step 6", 6, "loss")
    write_lines(b / "metrics.jsonl", metrics())
    found = diverge(a, b)  # b went on where a rolled back
    assert (found.first.stage, found.first.step, found.first.reading[:23]) == ("records", 7, "B has step 7, A has not")


def detoured(step, start):
    """A snapshot of `step` after a rollback to `start`, with other weights than without one."""
    return dataclasses.replace(moved(step, weights=["head.bias"]), past=Past(0, (Detour(6, start),)))


def test_checkpoints_of_different_branches_are_not_compared(tmp_path):
    # a goes back from step 6 to 3; b withholds the update of step 6. Their checkpoints 6 and 9 are not the same step.
    back = [*metrics(6), *(r | {"detour": 1, "loss": 4.0} for r in metrics()[3:])]
    a = make(tmp_path / "a", records=back, states=[snapshot(3), detoured(6, 3), detoured(9, 3)])
    b = make(tmp_path / "b", records=changed(6, skipped=True))
    found = diverge(a, b)
    assert (found.first.step, found.first.stage) == (6, "skipped") and [c.step for c in found.checkpoints] == [3]
    assert found.notes[1].startswith("checkpoints 6, 9 of A and B: not after the same number of rollbacks")


def test_the_branch_that_was_left_comes_before_the_checkpoints_of_the_other(tmp_path):
    # Both go back from step 6 to 3; their losses differ at step 5 before that, and all checkpoints after it.
    def records(loss):
        left = metrics(6)
        left[4]["loss"] = loss
        return [*left, *(r | {"detour": 1, "loss": loss} for r in metrics()[3:])]

    a = make(tmp_path / "a", records=records(4.0), states=[snapshot(3), detoured(4, 3), detoured(9, 3)])
    b = make(
        tmp_path / "b",
        records=records(4.5),
        states=[snapshot(3), *(dataclasses.replace(snapshot(s), past=Past(0, (Detour(6, 3),))) for s in (4, 9))],
    )
    found = diverge(a, b)
    assert (found.first.at, found.first.stage) == ("step 5", "loss") and "checkpoint 3" in found.first.reading
    assert [c.place for c in found.checkpoints] == [(0, 3), (1, 4), (1, 9)] and not found.checkpoints[1].identical


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_compared(twin, monkeypatch):
    real = checkpoint.published
    monkeypatch.setattr(checkpoint, "published", lambda path: [*real(path), 12])
    found = twin()
    assert found.identical and len(found.checkpoints) == 3 and "checkpoint 12 of A and B" in found.notes[0]


def test_a_fork_is_no_cause_beside_the_run_that_it_left(tmp_path):
    forked = {"run": "a", "recipe": "r", "step": 3, "tokens": 1, "changed": []}
    a = make(tmp_path / "a")
    b = make(
        tmp_path / "b", manifest=MANIFEST | {"recipe": "s", "forked": forked}, records=changed(5, **PLANTED["loss"])
    )
    assert diverge(a, b).headline.startswith("no recorded cause (same seeds")
    # Two forks of one run with the same change, made at different steps: then it is one.
    c = make(tmp_path / "c", manifest=MANIFEST | {"recipe": "s", "forked": forked | {"step": 6}})
    assert diverge(b, c).headline.startswith("different manifest: forked.step 3 / 6")


@pytest.mark.parametrize(
    "event",
    [{"environment": 5}, {"environment": ["xx"]}, '{"event": "resume", "step": ' + "9" * 5000 + "}"],
    ids=["number", "pairs", "digits"],
)
def test_a_damaged_event_is_refused_by_line(tmp_path, event):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    text = event if isinstance(event, str) else json.dumps({"event": "resume", "step": 3} | event)
    (b / "events.jsonl").write_text('{"event": "start", "step": 0}\n' + text + "\n")
    with pytest.raises(FormatError, match=r"b/events.jsonl:2: damaged"):
        diverge(a, b)


def test_a_validation_without_a_number_of_a_step_is_refused(tmp_path):
    val = [[{"step": "x", "loss": loss, "windows": 8}] for loss in (1.0, 2.0)]
    a, b = (make(tmp_path / n, validation=v) for n, v in zip("ab", val, strict=True))
    with pytest.raises(FormatError, match=r"validation.jsonl: step x, windows 8 is not the number of a step"):
        diverge(a, b)


def test_a_withheld_update_is_a_difference_of_its_own(twin):
    found = twin(records=changed(5, skipped=True))
    assert (found.first.step, found.first.stage) == (5, "skipped") and "whether the update was made" in found.headline


# ---- causes


def manifest(**changes):
    """The manifest with dotted names set."""
    made = copy.deepcopy(MANIFEST)
    for name, value in changes.items():
        *path, last = name.split("__")
        at = made
        for part in path:
            at = at[part]
        at[last] = value
    return made


CAUSES = [  # what differs in the manifest, a stage it can reach, one it cannot, what the headline leads with
    ({"environment__decides__blas__version": "0.3.29"}, "loss", "rows", "different environment: blas.version 0.3.30 / 0.3.29"),
    ({"environment__decides__mlx": "0.33.0"}, "grad_norm", "batch", "different environment: mlx 0.32.4 / 0.33.0"),
    ({"environment__decides__variables": {"MLX_ENABLE_TF32": "0"}}, "loss", "lr", "different environment: variables.MLX_ENABLE_TF32 none / 0"),
    ({"environment__decides__blas__threads": 2}, "loss", "lr", "different environment: blas.threads 1 / 2"),
    ({"corpus__digest": "decaf"}, "rows", "loss", "different corpus: digest c0ffee / decaf"),
    ({"corpus__digest": "decaf"}, "batch", "lr", "different corpus: digest c0ffee / decaf"),
    ({"config__seeds__data_seed": 8}, "rows", "loss", "different seed: data_seed 7 / 8"),
    ({"config__seeds__seed": 8, "config__seeds__init_seed": 8, "config__seeds__data_seed": 8}, "loss", "lr", "different seed: seed, init_seed, data_seed 7 / 8; first"),
    ({"config__optim__max_lr": 0.5}, "lr", "loss", "different config: max_lr 0.002 / 0.5"),
    ({"config__model__dropout": 0.5}, "loss", "rows", "different config: dropout 0.0 / 0.5"),
    ({"config__loop__kernels": "default"}, "grad_norm", "rows", "different config: kernels deterministic / default"),
    ({"code__source": "bb", "code__commit": "22"}, "rows", None, "different code: commit 11 / 22, source aa / bb|different code: source aa / bb, commit 11 / 22"),
    ({"config__optim__on_spike": "skip"}, "grad_norm", None, "different config: on_spike warn / skip"),
    ({"fork": {"from": "runs/x", "at": 3}}, "loss", None, "different manifest: fork.from none / runs/x"),
    ({"config__model__new_setting": 1}, "loss", "rows", "different config: new_setting none / 1"),
]  # fmt: skip


@pytest.mark.parametrize("changes, stage, other, said", CAUSES)
def test_a_cause_outside_the_numbers_leads_the_verdict_where_it_can_be_one(tmp_path, changes, stage, other, said):
    a, b = (
        make(tmp_path / "a"),
        make(tmp_path / "b", records=changed(5, **PLANTED[stage]), manifest=manifest(**changes)),
    )
    found = diverge(a, b)
    assert any(found.headline.startswith(s) for s in said.split("|")), found.headline
    assert all(c["decides"] for c in found.as_dict()["causes"]) and any(
        c["explains"] for c in found.as_dict()["causes"]
    )
    if other:
        write_lines(b / "metrics.jsonl", changed(5, **PLANTED[other]))
        found = diverge(a, b)
        assert found.headline.startswith("no recorded cause (") and "cannot be why" in found.headline


def test_comfort_is_listed_apart_and_explains_nothing(tmp_path):
    changes = {
        "config__loop__prefetch": 9,
        "config__data__data": ["elsewhere.txt"],
        "environment__notes__python": "3.12.1",
        "code__dirty": True,
    }
    found = diverge(
        make(tmp_path / "a"), make(tmp_path / "b", records=changed(5, **PLANTED["loss"]), manifest=manifest(**changes))
    )
    told = found.as_dict()
    assert told["causes"] == [] and found.headline.startswith("no recorded cause (same seeds")
    assert {c["name"] for c in told["cannot_change_bits"]} == {"prefetch", "data", "python", "dirty"}


def test_every_setting_is_a_cause_exactly_if_it_is_not_comfort():
    for name, f in FIELDS.items():
        (cause,) = causes(MANIFEST, manifest(**{f"config__{f.section}__{name}": "other"}))
        decides = not f.comfort and name not in (
            "lora_targets",
            "base",
        )  # no adapters here; a base counts by its digest
        assert cause.name == name and cause.decides is decides, name


def test_of_a_base_its_digest_is_a_cause_and_its_place_is_not():
    a, b = (MANIFEST | {"base": {"run": run, "step": 3, "digest": digest}} for run, digest in (("x", "1"), ("y", "1")))
    assert causes(a, b) == []
    other = b | {"base": {"run": "x", "step": 3, "digest": "2"}}
    assert [(c.kind, c.name, c.decides) for c in causes(a, other)] == [("manifest", "base.digest", True)]
    assert [(c.name, c.a) for c in causes(MANIFEST, a)] == [("base.digest", None)]


def test_identical_in_another_environment_is_identical_and_says_so(twin):
    found = twin(manifest=manifest(environment__decides__mlx="0.33.0"))
    assert found.identical and "identical although the manifests differ in environment" in found.notes


def test_a_resume_in_another_environment_is_a_cause(twin):
    events = [{"event": "resume", "step": 3, "exact": False, "environment": [["mlx", "0.32.4", "0.33.0"]]}]
    found = twin(records=changed(5, **PLANTED["loss"]), events=events)
    assert found.headline.startswith("different resume: B mlx 0.33.0 from step 3 on, instead of 0.32.4; first")
    assert "B: resume at step 3, not exact: in another environment" in found.notes


def test_an_exact_resume_is_mentioned_and_is_no_cause(twin):
    found = twin(
        records=changed(5, **PLANTED["loss"]), events=[{"event": "resume", "step": 3, "exact": True, "environment": []}]
    )
    assert "B: resume at step 3" in found.notes and found.headline.startswith("no recorded cause")


# ---- any two JSONL files


def files(tmp_path, a, b):
    """Write two files (text, bytes or records) and return their paths."""
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, content in zip(paths, (a, b), strict=True):
        if isinstance(content, list):
            write_lines(path, content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return paths


EQUAL = ["1.0 1.00", "1 1.0", "100 1e2", "0.1 1E-1", "NaN NaN", "Infinity Infinity", "-0.0 -0", "[1, 2.0] [1.0,2]",
         '{"x":1,"y":[]} {"y":[],"x":1.0}', f"{10**400} 1e400", '"\\u0041" "A"', "null null"]  # fmt: skip
UNEQUAL = ["-0.0 0.0", "0 -0", f"{2**53} {2**53 + 1}", f"{10**400} {10**400 + 1}", '1 "1"', "1 true", "0 false", "0 null", "NaN Infinity",
           "Infinity -Infinity", "NaN 0", "[1] [1,1]", "[1] 1", '{"x":1} {"x":1,"y":1}', "0.1 0.1000000000000000055511151231257827", "1e400 2e400", '"a" "A"']  # fmt: skip


@pytest.mark.parametrize("pair, equal", [(p, True) for p in EQUAL] + [(p, False) for p in UNEQUAL])
def test_values_are_compared_exactly(tmp_path, pair, equal):
    a, b = (
        pair.split(" ")
        if pair[0] not in "[{"
        else (pair[: pair.index("] ") + 1], pair[pair.index("] ") + 2 :])
        if pair[0] == "["
        else (pair[: pair.index("} ") + 1], pair[pair.index("} ") + 2 :])
    )
    found = diverge(*files(tmp_path, f'{{"step": 1, "v": {a}}}\n', f'{{"step": 1, "v": {b}}}\n'))
    assert found.identical is equal
    assert diverge(tmp_path / "b.jsonl", tmp_path / "a.jsonl").identical is equal


def test_distances_are_those_of_exact_rationals():
    rng = random.Random(3)
    for _ in range(500):
        x, y = (
            rng.choice([repr(rng.uniform(-9, 9) * 10.0 ** rng.randint(-300, 300)), str(rng.getrandbits(90)), "0.0"])
            for _ in "ab"
        )
        gap = abs(Fraction(x) - Fraction(y))
        assert distance(Number(x), Number(y)) == pytest.approx(float(gap), rel=1e-15, abs=0)
        if Fraction(x) and gap / abs(Fraction(x)) < Fraction(10) ** 300:
            assert relative(Number(x), Number(y)) == pytest.approx(float(gap / abs(Fraction(x))), rel=1e-15, abs=0)
        assert same(Number(x), Number(y)) is (gap == 0)
    assert relative(Number("0"), Number("1")) is None and distance(Number("NaN"), Number("1")) is None
    assert distance("a", "b") is None and distance(Number("1e400"), Number("0")) is None


def test_first_difference_follows_the_order_of_the_fields_given(tmp_path):
    a = [{"step": s, "t": 10 * s, "x": 1, "y": 2, "z": 3} for s in (1, 2, 3)]
    b = [dict(r, t=r["t"] + 1) for r in a]
    b[1] |= {"x": 5, "z": 5}
    paths = files(tmp_path, a, b)
    assert diverge(*paths).first.stage == "t"  # a time is not left out unasked
    assert (diverge(*paths, ignore=["t"]).first.stage, diverge(*paths, ignore=["t"]).first.step) == ("x", 2)
    assert diverge(*paths, fields=["z", "x"]).first.stage == "z"
    assert diverge(*paths, fields=["y"]).identical
    with pytest.raises(UsageError, match=r"--fields: no common record of .*a\.jsonl and .*b\.jsonl has 'q'"):
        diverge(*paths, fields=["x", "q"])
    for wrong in ({"fields": ["x"], "ignore": ["x"]}, {"fields": ["step"], "key": ["step"]}):
        with pytest.raises(UsageError, match="is also in --key or --ignore"):
            diverge(*paths, **wrong)
    with pytest.raises(UsageError, match="a name is empty"):
        diverge(*paths, fields=["x", ""])
    with pytest.raises(UsageError, match="contradicts"):
        diverge(*paths, key=["step"], by_position=True)


def test_a_field_of_one_file_alone_is_listed_and_one_missing_in_a_record_differs(tmp_path):
    a = [{"step": s, "x": s, "only": 1} for s in range(5)]
    found = diverge(*files(tmp_path, a, [{"step": s, "x": s} for s in range(5)]))
    assert found.identical and "only A has the fields 'only': not compared" in found.notes
    b = copy.deepcopy(a)
    del b[0]["only"], b[3]["x"]
    found = diverge(*files(tmp_path, a, b))
    assert (found.first.stage, found.first.step) == ("only", 0) and found.first.fields["only"]["b"] is None
    assert (found.log.fields["x"].differing, found.log.fields["x"].lone, found.log.fields["x"].equal_again) == (1, 1, 1)


def test_keys_of_several_fields_positions_and_strings(tmp_path):
    a = [{"epoch": e, "split": s, "v": 1} for e in (1, 2) for s in ("test", "train")]
    b = copy.deepcopy(a)
    b[2]["v"] = 2
    found = diverge(*files(tmp_path, a, b), key=["epoch", "split"])
    assert found.first.at == "epoch 2, split test" and found.first.step is None
    assert diverge(*files(tmp_path, a, b)).first.at == "record 3"  # no field "step": by position
    assert diverge(*files(tmp_path, a, b), by_position=True).first.step == 3
    numbers = [{"step": n, "v": 1} for n in (2, 9, 10, 100)]  # by value, not by spelling
    assert diverge(*files(tmp_path, numbers, numbers)).identical


REFUSED = {
    '{"step": 1}\n{"step": 3}\n\n{"step": 2}\n': "b.jsonl:4: step 2 comes after step 3 .line 2.",
    '{"step": 1}\n{"step": 1.0}\n': "b.jsonl:2: step 1.0 occurs twice .line 1.",
    '{"step": 1}\n{"x": 1}\n': "b.jsonl:2: the key field 'step' is missing",
    '{"step": 1}\n{"step": null}\n': "b.jsonl:2: the key field 'step' is 'null', not a number",
    '{"step": 1}\n{"step": NaN}\n': "b.jsonl:2: the key field 'step' is 'NaN'",
    '{"step": 1}\n{"step": true}\n': "b.jsonl:2: the key field",
    '{"step": 1}\n[1]\n': "b.jsonl:2: is not a JSON object",
    '{"step": 1}\n{"step": 2,}\n': "b.jsonl:2: is not JSON: .* at character 1[12]",
    '{"step": 1}\n{"step": 2, "v": nan}\n': "b.jsonl:2: is not JSON",
    '{"step": 1}\n{"step": 2, "v": 1, "v": 2}\n': "b.jsonl:2: has the name 'v' twice",
    '{"step": 1}\n{"step": 2, "v": 1e99999999999999999999}\n': "b.jsonl:2: holds .* beyond all measure",
    '{"step": 1}\n{"step": 2} {"step": 3}\n': "b.jsonl:2: is not JSON: Extra data",
    '{"step": 1}\n' + "[" * 100_000 + "\n": "b.jsonl:2: is n",
    b'{"step": 1}\n{"step": 2, "v": "\x92"}\n': "b.jsonl:2: is not UTF-8",
    b"\x00\x01\x02\n": "b.jsonl:1: is not",
    '{"step": 1}\n'.encode("utf-16"): "b.jsonl:1: is not UTF-8",
}


@pytest.mark.parametrize("content", REFUSED, ids=range(len(REFUSED)))
def test_a_bad_line_is_refused_by_file_and_line_with_exit_2(tmp_path, content, capfd):
    import re

    paths = files(tmp_path, [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4}], content)
    assert cli(["diverge", *map(str, paths), "--json", "--key", "step"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and re.search(REFUSED[content], err) and "Traceback" not in err and len(err.splitlines()) == 1


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_read(tmp_path):
    plain = [{"step": 1, "v": 2}, {"step": 2, "v": 2}]
    text = '\ufeff{"step": 1, "v": 2}\r\n\r\n{"step": 2, "v": 3}\r\n'
    found = diverge(*files(tmp_path, plain, text))
    assert found.first.step == 2 and found.first.fields["v"]["line_b"] == 3


def test_records_before_between_and_after(tmp_path):
    found = diverge(
        *files(tmp_path, [{"step": s, "v": 1} for s in (1, 2, 3, 5, 6, 7)], [{"step": s, "v": 1} for s in (3, 4, 5, 6)])
    )
    sides = found.as_dict()["logs"]
    assert [sides["a"][f"only_here_{p}"]["count"] for p in ("before", "between", "after")] == [2, 0, 1]
    assert [sides["b"][f"only_here_{p}"]["count"] for p in ("before", "between", "after")] == [0, 1, 0]
    assert (found.first.stage, found.first.step, found.log.common) == ("records", 4, 3)
    assert any("B starts at step 3, A at step 1" in note for note in found.notes)


def test_growth_is_the_maximum_of_each_stretch_and_memory_does_not_grow_with_the_file(tmp_path):
    rng = random.Random(5)
    count, start = 6_000, 1_500
    values = [rng.random() for _ in range(count)]
    other = [v if i < start or i % 7 == 0 else v + rng.random() * 1e-3 for i, v in enumerate(values)]
    paths = files(
        tmp_path,
        [{"step": i, "loss": v} for i, v in enumerate(values)],
        [{"step": i, "loss": v} for i, v in enumerate(other)],
    )
    tracemalloc.start()
    found = compare_records(*paths).fields["loss"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000  # the files are 0.5 MB
    gaps = [abs(Fraction(repr(a)) - Fraction(repr(b))) for a, b in zip(values, other, strict=True)]
    first = next(i for i, g in enumerate(gaps) if g)
    told = found.as_dict()
    assert (told["first"]["key"], told["compared"]) == (f"step {first}", count)
    assert told["differing"] == sum(g > 0 for g in gaps) and told["equal_again"] == sum(g == 0 for g in gaps[first:])
    assert (
        told["largest"]["absolute"] == float(max(gaps))
        and told["last"]["key"] == f"step {max(i for i, g in enumerate(gaps) if g)}"
    )
    at = first
    assert len(told["growth"]) <= STRETCHES
    for stretch in told["growth"]:
        part = gaps[at : at + stretch["records"]]
        assert (stretch["from"], stretch["to"], stretch["largest"]) == (
            f"step {at}",
            f"step {at + len(part) - 1}",
            float(max(part)),
        )
        at += len(part)
    assert at == count


# ---- the command line, and real runs


def test_exit_codes_and_one_json_object(tmp_path, capfd):
    a, b, c = (
        make(tmp_path / "a"),
        make(tmp_path / "b"),
        make(tmp_path / "c", records=changed(5, **PLANTED["rows"]), manifest=manifest(config__seeds__data_seed=8)),
    )
    assert cli(["diverge", str(a), str(b)]) == 0 and "identical" in capfd.readouterr().out
    assert cli(["diverge", str(a), str(c)]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "different seed: data_seed 7 / 8" in said and "rows of the batch" in said and "501" in said
    assert cli(["diverge", str(a), str(c), "--json"]) == 1
    told = json.loads(capfd.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert (
        told["verdict"] == "differs"
        and told["first"]["step"] == 5
        and told["first"]["fields"]["rows"]["b"] == "[5, 50, 501]"
    )
    assert set(told) >= {
        "a",
        "b",
        "kind",
        "headline",
        "compared",
        "logs",
        "fields",
        "checkpoints",
        "validation",
        "causes",
        "cannot_change_bits",
        "events",
        "notes",
    }
    assert cli(["diverge", str(a), str(tmp_path / "none")]) == 2


def test_json_holds_no_nan_whatever_the_events_and_manifests_hold(tmp_path, capfd):
    config = manifest(config__optim__grad_clip=math.inf)
    a, b = make(tmp_path / "a"), make(tmp_path / "b", manifest=config, events=[{"event": "spike", "loss": math.nan}])
    assert cli(["diverge", str(a), str(b), "--json"]) == 0
    told = json.loads(capfd.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert told["events"]["b"][0]["loss"] == "nan" and told["causes"][0]["b"] == "inf"


def test_a_line_nested_too_deeply_is_refused_before_it_is_compared(tmp_path, capfd):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, inner in zip(paths, "12", strict=True):
        path.write_text('{"step": 1, "x": ' + "[" * 900 + inner + "]" * 900 + "}\n")
    assert cli(["diverge", *map(str, paths)]) == 2 and "a:1: is nested too deeply" in capfd.readouterr().err


def test_numbers_beyond_all_measure_cost_no_time_and_no_traceback(tmp_path, capfd):
    for n, (x, y) in enumerate([("1e999999999", "1.0"), ("1.0", "1e999999999999"), ("1e10000", "-1e99999999")]):
        paths = [tmp_path / f"{n}{side}" for side in "ab"]
        for path, loss in zip(paths, (y, f"-{y}" if y[0] != "-" else y[1:]), strict=True):
            path.write_text(f'{{"step": {x}, "loss": {loss}}}\n')
        assert cli(["diverge", *map(str, paths), "--json"]) == 1
        first = json.loads(capfd.readouterr().out)["first"]
        assert first["at"] == f"step {x}" and first["step"] == (1 if x == "1.0" else None)


def test_control_characters_and_markup_of_a_log_do_not_reach_the_terminal(tmp_path, capfd):
    name = "[bold]x\x1b[31m\n"
    paths = files(tmp_path, [{"step": 1, name: "\x1b]0;t\x07", "lone": 1}], [{"step": 1, name: "[red]", "\x1bq": 2}])
    assert cli(["diverge", *map(str, paths)]) == 1
    said = capfd.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "[bold]x" in said and "[red]" in said
    assert r"\x1bq" in said and r"\u0007" in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """Real runs of four steps: a and its repetition, another seed, another text; two with a racing gradient."""
    where = tmp_path_factory.mktemp("runs")
    other = where / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    settings = {"preset": "nano", "layers": 1, "width": 16, "heads": 2, "mlp": 32, "context": 32, "batch": 8, "steps": 4, "save_every": 1,
                "keep": 0, "val_every": 2, "val_windows": 4, "grad_clip": 0, "device": "cpu"}  # fmt: skip
    for name, data, seed in (("a", text, 3), ("again", text, 3), ("seed", text, 4), ("text", other, 3)):
        mlxdet.train(TrainConfig.of(**settings, data=[str(data)], seed=seed), where / name)
    flags = [word for k, v in settings.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    for name in ("race-1", "race-2"):
        done = command_line("train", *flags, "--data", str(text), "--seed", "3", "--out", str(where / name), "--json",
                            command=[sys.executable, "-m", "mlxdet.measure.faults", "race"])  # fmt: skip
        assert done.returncode == 0, done.stderr
    return where


def test_a_real_run_and_its_repetition_are_identical(trained):
    found = diverge(trained / "a", trained / "again")
    assert found.identical and found.log.common == 4 and [c.step for c in found.checkpoints] == [1, 2, 3, 4]


def test_a_racing_embedding_gradient_is_traced_to_the_embedding_though_the_log_agrees(trained):
    found = diverge(trained / "race-1", trained / "race-2")
    # Which sums the race hits is chance: most often none that the logged norm of step 1 shows.
    assert found.first.step == 1 and found.first.stage in ("grad_norm", "weights")
    assert [t["name"] for t in found.first.tensors if t["group"] == "first moments"] == ["token_embedding.weight.m"]
    assert "the backward pass" in found.first.reading
    assert {c.kind for c in found.causes if c.decides} <= {"code"}  # somebody may edit the sources between the runs


def test_another_seed_and_another_text_are_named_as_the_cause(trained):
    found = diverge(trained / "a", trained / "seed")
    assert (found.first.step, found.first.stage) == (1, "rows")
    assert found.headline.startswith("different seed: seed, init_seed, data_seed 3 / 4; first")
    assert "the validation before step 1 differs too" in found.first.reading
    found = diverge(trained / "a", trained / "text")
    assert (found.first.step, found.first.stage) == (1, "batch")
    assert found.headline.startswith("different corpus: files text.txt / other.txt, digest")
    assert found.log.fields["rows"].differing == 0
