"""Whole runs, twice: what should change nothing changes no bit, and what should change something does."""

import json
import sys

import pytest

from tests.conftest import mlxdet
from tests.twin.families import FAMILIES, arguments, contents, differing


def train(family, text, model, out, *flags, command=(sys.executable, "-m", "mlxdet"), **env):
    done = mlxdet("train", *arguments(family, text, model), "--out", str(out), *flags, command=command, **env)
    assert done.returncode == 0, done.stderr
    return out


SWITCHES = {
    "nothing": "",
    "no prefetch": "--no-prefetch",
    "prefetch 1": "--prefetch 1",
    "prefetch 4": "--prefetch 4",
    "validation every 3": "--val-every 3",
    "no validation": "--val-every 0",
    "other validation windows": "--val-every 5 --val-windows 3",
    "saving every step": "--save-every 1 --keep 2",
    "saving every 7": "--save-every 7 --keep 0",
    "samples": "--sample-every 5 --sample-tokens 9 --sample-prompt x",
    "throttle": "--throttle 0.3",
    "log": "--log-every 1",
    "cache limit": "--cache-limit 0.001",
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_speed_and_comfort_change_no_bit(reference, text, model, tmp_path, switch):
    out = train("base", text, model, tmp_path / "run", *SWITCHES[switch].split())
    assert differing(reference("base"), out) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_process_with_other_switches_and_hash_seed_gives_the_same_files(
    reference, text, model, tmp_path, family
):
    flags = [
        "--prefetch",
        "4",
        "--val-every",
        "3",
        "--save-every",
        "5",
        "--sample-every",
        "6",
        "--sample-tokens",
        "5",
        "--keep",
        "1",
    ]
    out = train(family, text, model, tmp_path / "run", *flags, PYTHONHASHSEED="99", LANG="C")
    assert differing(reference(family), out) == []


def test_families_and_seeds_are_really_different(reference, text, model, tmp_path):
    """The negative control of the two tests above: the comparison sees a difference where there is one."""
    seen = [contents(reference(f))["model.safetensors"] for f in FAMILIES if f != "default kernels"]
    for n, flags in enumerate(["--seed 8", "--init-seed 8", "--data-seed 8", f"--seed {7 + (1 << 32)}"]):
        out = train("base", text, model, tmp_path / f"run{n}", *flags.split())
        assert differing(reference("base"), out) == [
            "metrics.jsonl",
            "model.safetensors",
            "optimizer.safetensors",
            "state.json",
        ]
        seen.append(contents(out)["model.safetensors"])
    assert len(set(seen)) == len(seen)


def first_record(run):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])


def test_init_and_data_can_be_held_fixed_apart(reference, text, model, tmp_path):
    base = first_record(reference("base"))
    other_init = first_record(train("base", text, model, tmp_path / "a", "--init-seed", "8"))
    other_data = first_record(train("base", text, model, tmp_path / "b", "--data-seed", "8"))
    assert other_init["batch"] == base["batch"] and other_init["loss"] != base["loss"]
    assert other_data["batch"] != base["batch"] and other_data["loss"] != base["loss"]


def test_python_gives_the_bits_of_the_command_line(reference, text, tmp_path):
    from mlxdet import TrainConfig, train

    run = train(
        TrainConfig.of(preset="nano", layers=1, width=32, mlp=64, context=32, batch=4, steps=24, seed=7, max_lr=3e-3,
                       val_windows=8, data=str(text), device="cpu"),
        out=tmp_path / "run",
    )  # fmt: skip
    assert run.stopped == "done" and differing(reference("base"), run.path) == []


def test_at_a_learning_rate_of_zero_validation_is_constant_to_the_last_bit(text, model, tmp_path):
    out = train("base", text, model, tmp_path / "run", *["--max-lr", "0", "--min-lr", "0", "--val-every", "4"])
    values = [json.loads(x)["loss_hex"] for x in (out / "validation.jsonl").read_text().splitlines()]
    assert len(values) == 7 and len(set(values)) == 1


def test_memory_stays_bounded_over_many_steps_of_constant_shape(text, model, tmp_path):
    flags = ["--steps", "300", "--val-every", "50", "--save-every", "60"]
    out = train("base", text, model, tmp_path / "run", *flags)
    timing = [json.loads(x) for x in (out / "timing.jsonl").read_text().splitlines()]
    assert len(timing) == 300
    early, late = timing[20:100], timing[-80:]
    for what in ("active", "cache", "peak"):
        assert max(t[what] for t in late) <= max(t[what] for t in early) * 1.02 + 65536, what
    assert max(t["resident"] for t in late) <= max(t["resident"] for t in early) * 1.05 + (4 << 20)
