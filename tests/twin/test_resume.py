"""Stopped anywhere, continued in a new process, equal to the run that was never stopped."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import mlxdet
from tests.twin.families import FAMILIES, STEPS, arguments, differing


def start(args):
    return subprocess.Popen(
        [sys.executable, "-m", "mlxdet", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(child, run, step, timeout=60):
    """Wait until `step` is logged; fail if the child ends first."""
    log, limit = run / "metrics.jsonl", time.monotonic() + timeout
    while time.monotonic() < limit:
        if log.exists() and log.read_bytes().count(b"\n") >= step:
            return
        if child.poll() is not None:
            pytest.fail(f"ended early: {child.communicate()}")
        time.sleep(0.002)
    pytest.fail("timed out")


@pytest.mark.parametrize("number", range(30))
def test_thirty_random_kills(reference, text, model, tmp_path, number):
    """kill -9 at random moments, from before the manifest is written to after the last save, up to three times a run."""
    rng = random.Random(number)
    family, out = list(FAMILIES)[number % len(FAMILIES)], tmp_path / "run"
    save_every = str(rng.choice([1, 3, 5, 24]))
    train = ["train", *arguments(family, text, model), "--out", str(out), "--save-every", save_every]
    train += ["--keep", str(rng.choice([0, 1, 2])), "--throttle", str(rng.choice([0, 0.5, 0.8]))]
    for _ in range(rng.randint(1, 3)):
        args = ["resume", str(out)] if (out / "run.json").exists() else train
        child = start(args)
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0.1, 1.2))  # while importing, reading the text, making the directory
        else:
            limit, after = time.monotonic() + 60, rng.randint(0, STEPS)
            while child.poll() is None and time.monotonic() < limit:
                log = out / "metrics.jsonl"
                if log.exists() and log.read_bytes().count(b"\n") >= after:
                    break
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if (out / "run.json").exists():  # readable at any moment
            shown = mlxdet("batches", str(out), "--step", "1", "--json")
            assert shown.returncode == 0, shown.stderr
    done = mlxdet(*(["resume", str(out), "--throttle", "0"] if (out / "run.json").exists() else train))
    assert done.returncode == 0, done.stderr
    assert differing(reference(family), out) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_signal_finishes_the_step_saves_and_exits_130(reference, text, model, tmp_path, number, code):
    out = tmp_path / "run"
    child = start(
        ["train", *arguments("dropout", text, model), "--out", str(out), "--save-every", "0", "--throttle", "0.8"]
    )
    wait_for_step(child, out, 6)
    child.send_signal(number)
    said, errors = child.communicate(timeout=60)
    assert child.returncode == code and "Interrupted and saved at step" in said and "mlxdet resume" in said, errors
    steps = [p.name for p in (out / "checkpoints").iterdir()]
    assert len(steps) == 1 and 6 <= int(steps[0]) < STEPS
    done = mlxdet("resume", str(out), "--throttle", "0", "--json")
    assert json.loads(done.stdout)["step"] == STEPS
    assert differing(reference("dropout"), out) == []


def test_stopping_and_resuming_every_few_steps_is_one_run(reference, text, model, tmp_path):
    out = tmp_path / "run"
    child = start(["train", *arguments("everything", text, model), "--out", str(out), "--throttle", "0.7"])
    for _ in range(4):
        have = (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0
        wait_for_step(child, out, min(have + 3, STEPS))
        child.send_signal(signal.SIGINT)
        child.communicate()
        if child.returncode == 0:
            break
        child = start(["resume", str(out), "--throttle", "0.7"])
    child.communicate()
    assert mlxdet("resume", str(out), "--throttle", "0").returncode == 0
    assert differing(reference("everything"), out) == []


@pytest.fixture
def stopped(text, model, tmp_path):
    """A run of the family `dropout`, killed after step 10, with a checkpoint at 8."""
    out = tmp_path / "run"
    args = arguments("dropout", text, model)
    child = start(["train", *args, "--out", str(out), "--save-every", "4", "--throttle", "0.8"])
    wait_for_step(child, out, 10)
    child.kill()
    child.communicate()
    return out


def refused(*args, **env):
    done = mlxdet("resume", *args, **env)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return done.stderr


def test_a_full_disk_leaves_the_last_checkpoint_and_one_line(reference, stopped):
    before = sorted((stopped / "checkpoints").iterdir())
    last = before[-1]
    optimizer = (last / "optimizer.safetensors").stat().st_size

    def limit():  # no file may grow beyond this: the model fits, the optimizer does not
        resource.setrlimit(resource.RLIMIT_FSIZE, (optimizer - 100, optimizer - 100))

    done = subprocess.run(
        [sys.executable, "-m", "mlxdet", "resume", str(stopped), "--throttle", "0"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot save" in done.stderr and f"last good checkpoint is step {int(last.name)}" in done.stderr
    assert sorted((stopped / "checkpoints").iterdir()) == before
    assert mlxdet("resume", str(stopped), "--throttle", "0").returncode == 0
    assert differing(reference("dropout"), stopped) == []


def test_replayed_steps_must_reproduce_what_was_logged(stopped):
    """A changed bit in the log of a step beyond the checkpoint is a step that does not reproduce."""
    log = stopped / "metrics.jsonl"
    lines = log.read_text().splitlines()
    record = json.loads(lines[9])
    record["loss"] += 2.0**-21
    record["loss_hex"] = record["loss"].hex()
    lines[9] = json.dumps(record)
    log.write_text("\n".join(lines) + "\n")
    done = mlxdet("resume", str(stopped), "--throttle", "0")
    assert done.returncode == 1 and "step 10 did not reproduce: loss was logged as" in done.stderr


def test_a_resume_may_validate_over_other_windows(reference, text, model, tmp_path):
    out = tmp_path / "run"
    flags = ["--save-every", "4", "--val-every", "2", "--throttle", "0.8"]
    child = start(["train", *arguments("base", text, model), "--out", str(out), *flags])
    wait_for_step(child, out, 11)
    child.kill()
    child.communicate()
    done = mlxdet("resume", str(out), "--throttle", "0", "--val-windows", "3")
    assert done.returncode == 0, done.stderr
    assert differing(reference("base"), out) == []


def test_a_torn_last_line_is_dropped(reference, stopped):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')
    assert mlxdet("resume", str(stopped), "--throttle", "0").returncode == 0
    assert differing(reference("dropout"), stopped) == []


def test_a_damaged_newest_checkpoint_is_refused_by_name_and_can_be_removed(reference, stopped):
    newest = sorted((stopped / "checkpoints").iterdir())[-1]
    path = newest / "model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-7] ^= 4
    path.write_bytes(whole)
    said = refused(str(stopped))
    assert str(path) in said and "damaged" in said and f"remove {newest}" in said
    shutil.rmtree(newest)
    assert mlxdet("resume", str(stopped), "--throttle", "0").returncode == 0
    assert differing(reference("dropout"), stopped) == []


def test_what_decides_bits_cannot_be_changed(stopped):
    said = refused(str(stopped), "--batch", "5", "--seed", "9", "--schedule", "wsd", "--steps", "30")
    for line in ("--batch: the run has 4, asked for 5", "--seed: the run has 7, asked for 9",
                 "--schedule: the run has 'cosine', asked for 'wsd'", "--steps: the run has 24, asked for 30"):  # fmt: skip
        assert line in said


def test_a_changed_text_is_refused_with_what_differs(stopped, text, tmp_path):
    longer = tmp_path / "longer.txt"
    longer.write_bytes(text.read_bytes() + b"!")
    said = refused(str(stopped), "--data", str(longer))
    assert "not the one this run was trained on" in said and "tokens: the run has 50000, here it is 50001" in said


def test_a_moved_text_is_the_same_text(reference, stopped, text, tmp_path):
    moved = tmp_path / "elsewhere" / "other-name.txt"
    moved.parent.mkdir()
    shutil.copy(text, moved)
    assert mlxdet("resume", str(stopped), "--throttle", "0", "--data", str(moved)).returncode == 0
    assert differing(reference("dropout"), stopped) == []


def test_another_tokenizer_is_refused(stopped, model):
    assert "not the one this run was trained on" in refused(str(stopped), "--tokenizer", str(model))


def test_a_different_environment_is_named_and_can_be_accepted(stopped):
    said = refused(str(stopped), MLXDET_BLAS="none")
    assert "different environment" in said and "blas.name" in said and "--inexact" in said
    assert mlxdet("resume", str(stopped), "--throttle", "0", "--inexact", MLXDET_BLAS="none").returncode == 0
    events = [json.loads(x) for x in (stopped / "events.jsonl").read_text().splitlines()]
    resumed = [e for e in events if e["event"] == "resume"]
    steps = [json.loads(x)["step"] for x in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert resumed[-1]["exact"] is False and any("blas" in d[0] for d in resumed[-1]["environment"])


def test_a_finished_run_says_so_and_changes_nothing(reference, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference("base"), out)
    before = (out / "metrics.jsonl").read_bytes()
    done = mlxdet("resume", str(out), "--throttle", "0")
    assert done.returncode == 0 and "already done" in done.stdout
    assert (out / "metrics.jsonl").read_bytes() == before and differing(reference("base"), out) == []


def test_only_one_process_trains_a_run(stopped):
    child = start(["resume", str(stopped), "--throttle", "0.95"])
    wait_for_step(child, stopped, 12)
    said = refused(str(stopped))
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert "another process is training this run" in said


@pytest.mark.parametrize("damage", ["truncated", "not json", "changed setting", "missing"])
def test_a_damaged_manifest_is_refused_by_name(stopped, damage):
    path = stopped / "run.json"
    text = path.read_text()
    new = {"truncated": text[:200], "not json": "x", "changed setting": text.replace('"batch": 4', '"batch": 5')}.get(
        damage
    )
    path.unlink()
    if new is not None:
        path.write_text(new)
    assert str(stopped) in refused(str(stopped)) and os.path.exists(stopped / "checkpoints")
