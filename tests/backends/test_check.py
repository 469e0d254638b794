"""The device check with the CPU in the place of a GPU: there nothing races, so everything must hold; and with planted
races, wrong numbers, crashes and hangs, each of which it must report."""

import json
import math
import os
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from mlxdet.auditing.audit import audit_targets
from mlxdet.auditing.examples import EXAMPLES
from mlxdet.auditing.rules import RULES, TARGETS
from mlxdet.backends.cuda import norms
from mlxdet.backends.devices import Facts
from mlxdet.cli.device_check import command
from mlxdet.errors import Fault, UsageError
from mlxdet.measure import device_check, device_cost, device_kernels, device_programs
from mlxdet.measure.device_check import check
from mlxdet.measure.device_cost import Arm, Case
from mlxdet.measure.device_worker import Spec, Worker, repeat
from mlxdet.model import embedding

KERNELS = {kernel.name: kernel for kernel in device_kernels.kernels(cpu=True)}
SCATTERS = {name for name in KERNELS if " scatter" in name}  # in order on a CPU only


def worker(part: str, n: int = 6) -> Worker:
    return Worker(Spec(part, "cpu", "deterministic", "cuda", large=False, n=n, seconds=0.0))


def plant(tmp_path, code: str) -> tuple[str, ...]:
    """Return a command that runs a module of mlxdet after `code`, in which MODULE is its name."""
    path = tmp_path / "plant.py"
    path.write_text(
        "import runpy, sys\nfrom mlxdet import backends\nbackends.activate('cpu')\nsys.argv = sys.argv[1:]\n"
        f"MODULE = sys.argv[0]\n{code}\nrunpy.run_module(MODULE, run_name='__main__', alter_sys=True)\n"
    )
    return sys.executable, str(path)


# Programs, before any device


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_the_audit_judges_the_large_programs_as_it_does_the_small_ones(example):
    fn, args = device_programs.program(example, large=True)
    for target, found in audit_targets(fn, args, {}, TARGETS, example.inputs).items():
        leaks = example.leaks and target in RULES[example.rule].devices
        assert {f.rule for f in found.findings} == ({example.rule} if leaks else set()), (target, str(found))
        assert not found.not_audited


SCATTER_RULES = ("scatter-add", "scatter-axis-add", "scatter-assign")


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.leaks and e.rule in SCATTER_RULES], ids=lambda e: e.name)
def test_in_large_programs_tens_of_thousands_of_updates_meet(example):
    fn, args = device_programs.program(example, large=True)
    (finding,) = audit_targets(fn, args, {}, ("cuda",), example.inputs)["cuda"].findings
    assert math.prod(finding.shapes[-1]) >= 49_152  # updates, a thread each


def test_every_kernel_has_its_textbook_values_and_no_leak_on_a_gpu(backend):
    for name, kernel in KERNELS.items():
        fn, args, reference = kernel.make(False)
        error, output = device_kernels.worst(fn(*args), reference, kernel.outputs)
        assert error < kernel.limit, (name, output)
        if name not in SCATTERS:
            for found in audit_targets(fn, args, {}, ("metal", "cuda")).values():
                assert found.ok, (name, str(found))
    assert {n.split(",")[0] for n in KERNELS} >= {"layer_norm", "rms_norm", "attention", "routed layer"}


def test_the_kernels_of_a_gpu_are_those_of_the_cpu_in_both_dtypes_without_the_scatter():
    gpu = {kernel.name for kernel in device_kernels.kernels()}
    half = {f"{name}, bfloat16" for name in ("routed layer", "tokens sorted by expert")}
    assert gpu == (set(KERNELS) - SCATTERS) | half


def test_an_error_is_relative_to_the_largest_value_and_a_nan_is_infinite():
    got = [mx.array([1.0, -4.5]), mx.array([2.0])]
    assert device_kernels.worst(got, (np.array([1.0, -4.0]), np.array([2.0])), ("a", "b")) == (0.125, "a")
    bad = device_kernels.worst([mx.array([math.nan, 1.0])], (np.array([1.0, 1.0]),), ("a",))
    assert bad == (math.inf, "a")


# Races


def test_distinct_results_are_counted(backend):
    results = iter([1, 2, 1, 3, 2, 1, 1, 1])
    r = repeat(lambda: (mx.array([0.0]), mx.array([float(next(results))])), (), 8, math.inf)
    assert (r.n, r.identical, r.distinct) == (8, 5, 3)


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (1.0, 1.0 + 2**-23)])
def test_bits_are_compared_and_not_values(backend, one, other):
    results = iter([one, other])
    assert repeat(lambda: mx.array(next(results)), (), 2, math.inf).distinct == 2


def test_a_nan_is_itself_in_every_dtype(backend):
    for dtype in (mx.float32, mx.bfloat16, mx.float16, mx.complex64, mx.int8, mx.bool_):
        r = repeat(lambda d=dtype: mx.array([math.nan, 1.0]).astype(d), (), 2, math.inf)
        assert r.distinct == 1, dtype


def test_time_cuts_evaluations_but_never_below_six(backend):
    assert repeat(lambda: mx.ones(2), (), 300, time.monotonic() - 1).n == 6
    row = worker("rules", 7).programs["add_at_integers"](0.0)
    assert (row.n, row.asked, row.cut, row.verdict) == (6, 7, True, "holds")


def scrambled(ids, grad, vocab):
    """Added in an order that the system's generator picks, as float atomics add."""
    seed = int.from_bytes(os.urandom(4), "little")
    order = mx.random.permutation(ids.shape[0], key=mx.random.key(seed))
    return embedding.scatter(ids[order], grad[order], vocab)


def test_a_planted_race_in_a_program_listed_as_safe_fails(monkeypatch, backend):
    name = "embedding_gradient_fixed_point"
    assert worker("rules").programs[name](0.0).verdict == "holds"
    monkeypatch.setattr(embedding, "fixedpoint", scrambled)
    row = worker("rules").programs[name](0.0)
    assert row.verdict == "fails" and row.distinct > 1 and row.text == f"{row.identical} of 6 identical"


def test_a_planted_race_in_a_program_listed_as_racing_is_seen_and_not_run_on_for_ever(monkeypatch, backend):
    racing = next(e for e in EXAMPLES if e.name == "add_at")
    quiet = worker("rules").programs["add_at"](0.0)
    assert (quiet.verdict, quiet.text, quiet.claim) == ("not seen", "not seen to race (6 tries)", "can race")
    ids, rows = mx.random.randint(0, 4, (64,), key=mx.random.key(1)), mx.random.normal((64, 16), key=mx.random.key(2))
    monkeypatch.setattr(device_programs, "program", lambda e, large: (lambda: scrambled(ids, rows, 4), ()))
    row = worker("rules", 300)._example(racing, math.inf)
    assert row.verdict == "holds" and row.distinct > 1 and row.n == 24 and not row.cut


def test_wrong_numbers_fail_though_they_repeat(monkeypatch, backend):
    assert worker("kernels").programs["layer_norm, float32"](0.0).verdict == "holds"
    right = norms.layer_norm
    monkeypatch.setattr(norms, "layer_norm", lambda x, w, b, eps: right(x, w, b, 0.01))
    row = worker("kernels").programs["layer_norm, float32"](0.0)
    assert row.verdict == "fails" and row.identical == row.n and row.error > row.limit


def test_rules_the_audit_cannot_judge_make_no_claim(backend):
    row = worker("rules").programs["user-kernel"](0.0)
    assert (row.verdict, row.claim, row.n) == ("no claim", "none", 0)


# The whole, in processes of its own


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run rules and kernels as a user does, and return (CliRunner's result, the JSON, its path)."""
    out = tmp_path_factory.mktemp("check") / "cpu.json"
    run = command("cuda", device="cpu", large=False, rules="cuda", tries=7)
    done = CliRunner().invoke(run, ["--only", "rules", "--only", "kernels", "--out", str(out)])
    return done, json.loads(out.read_text()), out


def test_on_a_cpu_everything_repeats_and_no_race_is_seen(whole):
    done, found, _ = whole
    assert done.exit_code == 0, done.output
    assert found["holds"] and found["mlxdet"] and not found["failed"] and not found["not_run"]
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == {e.name for e in EXAMPLES} | {"user-kernel", "collective"} | set(KERNELS)
    racing = {e.name for e in EXAMPLES if e.leaks and "cuda" in RULES[e.rule].devices}
    assert set(found["not_seen_to_race"]) == racing == {n for n, row in rows.items() if row["claim"] == "can race"}
    for row in rows.values():
        if row["verdict"] != "no claim":
            assert (row["identical"], row["n"], row["distinct"], row["cut"]) == (7, 7, 1, False)


def test_the_table_says_what_was_measured_on(whole):
    done, found, _ = whole
    assert "device: cpu" in done.output and "pins, deterministic kernels: none" in done.output
    assert set(found["environment"]) == {"deterministic", "default"}
    assert "7 of 7 identical" in done.output and "not seen to race (7 tries)" in done.output
    assert done.output.splitlines().count("what was tried holds") == 1


def test_a_result_is_not_overwritten(whole):
    _, _, out = whole
    before = out.read_bytes()
    done = CliRunner().invoke(command("cuda", device="cpu", large=False), ["--out", str(out)])
    assert done.exit_code == 2 and out.read_bytes() == before
    assert f"--out: {out} is already there; name a new file" in done.output
    done = CliRunner().invoke(command("cuda", device="cpu"), ["--out", str(out.parent / "no" / "x.json")])
    assert done.exit_code == 2 and "is not a directory" in done.output


def test_the_planted_race_of_the_faults_fails_the_check(tmp_path):
    python = plant(tmp_path, "from mlxdet.measure import faults; faults.race()")
    run = command("cuda", device="cpu", large=False, rules="cuda", tries=6, python=python)
    done = CliRunner().invoke(run, ["--only", "kernels"])
    assert done.exit_code == 1, done.output
    assert "does not hold or was not run: kernels: segment_sum onehot, 256, float32" in done.output


def test_a_program_that_takes_its_process_down_is_named_and_the_others_run(tmp_path):
    code = (
        "from mlxdet.measure import device_kernels as k\nimport os\n"
        "k._lookup = lambda large, dtype: os.kill(os.getpid(), 9)\nk._segments = lambda *a: 1 / 0"
    )
    found = check("cpu", "cuda", ["kernels"], tries=6, large=False, python=plant(tmp_path, code))
    rows = {row.name: row for row in found.rows}
    assert not found.holds and set(rows) == set(KERNELS)
    for name, row in rows.items():
        if name.startswith("embedding lookup"):
            assert row.verdict == "not run" and "SIGKILL" in row.text
        elif name.startswith("segment_sum"):
            assert row.verdict == "not run" and row.text == "ZeroDivisionError: division by zero"
        else:
            assert row.verdict == "holds"


def test_a_program_that_hangs_is_stopped_in_time(tmp_path):
    code = "from mlxdet.measure import device_kernels as k\nimport time\nk._norm = lambda *a: time.sleep(600)"
    c = device_check._Check("cpu", "cuda", 6, False, plant(tmp_path, code), end=time.monotonic() + 4)
    began = time.monotonic()
    c.programs("kernels", 4.0)
    assert time.monotonic() - began < 12
    rows = {row.name: row for row in c.result.rows}
    assert set(rows) == set(KERNELS)
    assert rows["segment_sum onehot, 256, float32"].verdict == "holds"
    assert {rows[n].verdict for n in ("layer_norm, float32", "attention, causal, bfloat16")} == {"not run"}
    assert rows["layer_norm, float32"].text.startswith("stopped after")


SMOKE = """
import json
if MODULE == "mlxdet":
    assert sys.argv[1:] == ["smoke", "--device", "cpu", "--json"]
    print(json.dumps({"checks": [{"name": "step-0", "holds": True, "text": "step-0 bit-exact"},
                                 {"name": "hash", "holds": %s, "text": "hash: differs"}]}))
    sys.exit()
"""


@pytest.mark.parametrize("holds", [True, False])
def test_the_lines_of_smoke_are_taken_over(tmp_path, holds):
    found = check("cpu", "cuda", ["smoke"], minutes=0.2, python=plant(tmp_path, SMOKE % holds))
    assert [(r.name, r.verdict) for r in found.rows] == [("step-0", "holds"), ("hash", "holds" if holds else "fails")]
    assert found.holds is holds


def test_a_smoke_that_says_nothing_is_not_run(tmp_path):
    found = check("cpu", "cuda", ["smoke"], minutes=0.2, python=plant(tmp_path, "MODULE == 'mlxdet' and 1 / 0"))
    assert [r.verdict for r in found.rows] == ["not run"] and "ZeroDivisionError" in found.rows[0].text


COST = """
import json
if MODULE.endswith("cost"):
    seconds = {"deterministic": [9.0, 0.003, 0.003], "default": [0.002, 0.002, 9.0]}[sys.argv[2]]
    asked = []
    for line in sys.stdin:
        question = json.loads(line)
        if question["case"]["preset"] == "tiny":
            raise MemoryError("no memory")
        asked.append(question["steps"])
        assert asked == ([3] + 20 * [8])[:len(asked)]
        print(chr(1) + json.dumps({"seconds": [1e-9] if len(asked) < 2 else seconds}), flush=True)
    sys.exit()
"""


def test_the_cost_is_the_ratio_of_medians_in_turns(tmp_path):
    cases = [Case("nano", "float32"), Case("tiny", "bfloat16", 32_000)]
    found = check("cpu", "cuda", ["cost"], minutes=0.3, cases=cases, python=plant(tmp_path, COST))
    one, two = found.rows
    assert (one.name, one.verdict) == ("nano, float32", "measured")
    assert one.text == "1.50 (1.50 to 1.50): 3.00 ms a step, default kernels 2.00 ms; 20 rounds"
    assert (two.name, two.verdict) == ("tiny, bfloat16, 32000 ids", "not run")
    assert "MemoryError: no memory" in two.text


@pytest.mark.parametrize("kernels", ["deterministic", "default"])
def test_an_arm_times_whole_steps(monkeypatch, backend, kernels):
    monkeypatch.setattr(device_cost, "BATCH", 1)
    monkeypatch.setattr(mx, "compile", lambda fn, **kwargs: fn)
    arm = Arm("cpu", kernels)
    seconds = arm.turn(Case("nano", "bfloat16"), 2) + arm.turn(Case("nano", "bfloat16"), 1)
    assert len(seconds) == 3 and min(seconds) > 0
    assert arm.state.step == 3 and arm.step.config.loop.kernels == kernels


def test_a_spread_is_the_median_and_its_interval_by_order_statistics():
    # n = 20: rank (20 - 1.96 * sqrt(20)) / 2 = 5.6, so the 6th and the 15th of the sorted values.
    assert device_cost.spread([float(v) for v in range(20, 0, -1)]) == {"median": 10.5, "low": 6.0, "high": 15.0}


# Other machines, other settings


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_without_the_device_one_line_and_exit_2(monkeypatch, tmp_path, device):
    here = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), no_gpu="no NVIDIA driver is loaded on this machine")
    monkeypatch.setattr(Facts, "here", staticmethod(lambda: here))
    done = CliRunner().invoke(command(device), ["--quick", "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith(f"mlxdet: --device {device}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_the_entry_explains_itself(device):
    python = [sys.executable, "-m", f"mlxdet.backends.{device}.check", "--help"]
    done = subprocess.run(python, capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m mlxdet.backends.{device}.check --out" in done.stdout


def test_importing_the_entries_imports_no_mlx(python):
    code = "import sys, mlxdet.backends.cuda.check, mlxdet.backends.metal.check, mlxdet.measure.device_check\n"
    assert python(code + "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'numpy')])").stdout == "[]\n"


def test_a_variable_that_one_kind_of_kernels_pins_is_refused(monkeypatch):
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
    device_check._not_set("metal")
    with pytest.raises(UsageError, match="MLX_CUDA_USE_CUDNN_SDPA is set, but the check runs with and without it"):
        device_check._not_set("cuda")


def test_a_device_that_mlx_cannot_use_ends_it_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="no luck"):
        code = "from mlxdet.errors import UsageError\ndef activate(*a): raise UsageError('no luck')\nbackends.activate = activate"
        check("cpu", "cuda", ["rules"], python=plant(tmp_path, code))
    with pytest.raises(Fault, match="ZeroDivisionError"):
        check("cpu", "cuda", ["rules"], python=plant(tmp_path, "1 / 0"))


def test_quick_leaves_smoke_and_large_models_out(monkeypatch):
    ran = []
    monkeypatch.setattr(device_check._Check, "facts", lambda self: None)
    monkeypatch.setattr(device_check._Check, "programs", lambda self, part, s: ran.append((part, self.tries)))
    monkeypatch.setattr(device_check._Check, "cost", lambda self, s, cases: ran.append({c.preset for c in cases}))
    found = check("cpu", quick=True)
    assert ran == [("rules", 50), ("kernels", 50), {"nano", "tiny"}]
    assert found.left_out == {"smoke": "--quick"} and not found.holds  # nothing was measured
