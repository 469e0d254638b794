"""mlxdet smoke holds on this machine, and each of its lines fails for the fault it is there for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdet.measure.faults import FAULTS
from mlxdet.measure.smoke import divergence, smoke
from tests.conftest import mlxdet

CAUGHT_BY = {
    "race": {"same seed, weights", "one step repeated"},
    "unseeded-batches": {"step-0", "same seed, losses", "same seed, weights"},
    "one-seed": {"other seed, losses", "other seed, weights"},
    "hash-order": {"another PYTHONHASHSEED"},
    "evaluation-draws": {"other evaluation, sampling and save cadence"},
    "eager-workers": {"prefetch 0", "prefetch 1"},
    "forgotten-moments": {"kill -9 and resume"},
}


def test_all_lines_hold_here_in_the_stated_order():
    done = subprocess.run(
        [Path(__file__).parents[2] / "evals" / "determinism-smoke.sh", "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    starts = ["step-0 bit-exact: ", "same-seed max divergence: 0.00e+00 (<= 0.01) - bit-exact", "cross-seed divergence: ",
              "same-seed weights: relFro 0.00e+00, 0 of", "other-seed weights: relFro ", "one step repeated: 20 of 20",
              "prefetch 0: bit-exact", "prefetch 1: bit-exact", "prefetch 4: bit-exact", "other evaluation, ",
              "kill -9 and resume: bit-exact", "another PYTHONHASHSEED: bit-exact", "all hold"]  # fmt: skip
    assert len(lines) == len(starts) and all(a.startswith(b) for a, b in zip(lines, starts, strict=True)), done.stdout


def test_every_fault_has_a_line_that_catches_it():
    assert CAUGHT_BY.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_trips_its_line(tmp_path, fault):
    command = [sys.executable, "-m", "mlxdet.measure.faults", fault]
    # A fixed hash seed, so that the fault of hash order shows in its own line alone.
    fixed = [] if fault == "hash-order" else ["env", "PYTHONHASHSEED=1"]
    failed = set()
    for check in smoke(tmp_path, "cpu", [*fixed, *command]):
        if not check.holds:
            failed.add(check.name)
        if CAUGHT_BY[fault] <= failed:
            break
    assert CAUGHT_BY[fault] <= failed, failed


def test_a_training_that_fails_is_a_line_that_does_not_hold(tmp_path):
    checks = list(smoke(tmp_path, "cpu", ["false"]))
    assert [c.holds for c in checks] == [False] and "training failed" in checks[0].text


def test_json_and_a_bad_tolerance():
    done = mlxdet("smoke", DETERMINISM_TOL="tight")
    assert done.returncode == 2 and "DETERMINISM_TOL: 'tight'" in done.stderr
    done = mlxdet("smoke", "--json", "--device", "metal")
    assert done.returncode in (1, 2)
    if done.stdout:
        assert json.loads(done.stdout)["holds"] is False


def test_divergence_is_the_largest_difference_and_infinite_for_other_lengths():
    assert divergence([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == 0.5
    assert divergence([1.0], [1.0, 2.0]) == float("inf") and divergence([], []) == float("inf")
