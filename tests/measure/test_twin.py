"""A twin tells a deterministic program from a leaky one, whoever wrote it, and says what separates its runs."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from mlxdet.cli import run as cli
from mlxdet.errors import Fault, UsageError
from mlxdet.formats import Checkpoint, FormatError
from mlxdet.measure.commands import Part, Written, written
from mlxdet.measure.perturb import KINDS, THREADS, settings
from mlxdet.measure.twin import compare_written, twin

# Each run of it takes the next of the given outputs: {file: {tensor: [dtype, shape, values]}}, or text.
PLAY = """
import json, pathlib, struct, sys
script, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
turn = len(list(script.parent.glob("turn-*")))
(script.parent / f"turn-{turn}").touch()
CODES = {"F64": "d", "F32": "f", "I64": "q"}
for file, content in json.loads(script.read_text())[turn].items():
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        (out / file).write_text(content)
        continue
    header, data = {}, b""
    for name, (dtype, shape, values) in content.items():
        packed = struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    head = json.dumps(header).encode()
    (out / file).write_bytes(struct.pack("<Q", len(head)) + head + data)
"""

NUMPY = """
import sys, numpy as np
rng = np.random.default_rng(int(sys.argv[1]))
x, w = rng.normal(size=(64, 8)), rng.normal(size=8)
y, v = x @ rng.normal(size=8), np.zeros(8)
for _ in range(50):
    v = 0.9 * v - 0.01 * x.T @ (x @ w - y) / 64
    w = w + v
np.savez(sys.argv[2] + "/model.npz", w=w, v=v, step=np.int64(50))
"""

# Sums float32-like terms in the order of a set, then adds noise where LEAK says so.
LEAKY = """
import json, os, pathlib, struct, sys, time
total = 0.0
for word in {f"feature{i}" for i in range(200)}:
    total += 1.0 / (3 + sum(map(ord, word)))
if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
    total *= 1 + 1e-9
if os.environ.get("LEAK") == "noise":
    total *= 1 + struct.unpack("<H", os.urandom(2))[0] * 1e-12
data = struct.pack("<2d", total, 1.0)
head = json.dumps({"w": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}).encode()
pathlib.Path(sys.argv[1], "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
pathlib.Path(sys.argv[1], "log.txt").write_text(str(time.time_ns()))
"""


@pytest.fixture
def play(tmp_path):
    """Return a function: outputs of the runs, in order -> a command that writes them."""

    def make(*outputs):
        (tmp_path / "play.py").write_text(PLAY)
        (tmp_path / "script.json").write_text(json.dumps(outputs))
        return [sys.executable, str(tmp_path / "play.py"), str(tmp_path / "script.json"), "{out}"]

    return make


@pytest.fixture
def program(tmp_path):
    """Return a function: source -> the command that runs it."""

    def make(source, *arguments):
        (tmp_path / "program.py").write_text(source)
        return [sys.executable, str(tmp_path / "program.py"), *arguments]

    return make


def weights(*values, name="w", dtype="F64"):
    return {"model.safetensors": {name: [dtype, [len(values)], list(values)]}}


def test_a_numpy_program_is_identical_and_another_seed_is_not(program):
    result = twin(program(NUMPY, "7", "{out}"), reps=3, different=program(NUMPY, "8", "{out}"))
    assert (result.n, result.identical, result.floor, result.moved) == (3, 3, 0.0, [])
    assert result.holds and result.different.model_distance > 0.5 and result.separation == math.inf
    assert all(r.seconds > 0 for r in result.repetitions) and len(result.pairs) == 3


def test_a_seed_that_does_nothing_makes_the_gate_worthless(program):
    result = twin(program(NUMPY, "7", "{out}"), different=program(NUMPY, "7", "{out}"))
    assert result.identical == 2 and not result.holds
    assert result.failed == [
        "this gate could not fail: the other command moves the model by only relFro 0, less than --min-different 0.1"
    ]


def test_every_pair_is_held_to_the_tolerance_not_only_those_with_the_first(play):
    # ||(3, 4)|| = 5, so 4e-5 is 8e-6 of it: within 1e-5 of the first on either side, but 1.6e-5 from each other.
    command = play(weights(3, 4), weights(3, 4 + 4e-5), weights(3, 4 - 4e-5), weights(4.5, 6))
    result = twin(command, reps=3, different=command)
    first, second, third = result.pairs
    assert [p.distance for p in (first, second)] == pytest.approx([8e-6, 8e-6], rel=1e-6)
    assert third.distance == result.floor == pytest.approx(1.6e-5, rel=1e-5)
    assert result.identical == 1 and result.failed == ["2 and 3: relFro 1.6e-05 is above --tol 1e-05"]
    assert result.different.model_distance == pytest.approx(0.5) and result.separation == pytest.approx(31250, rel=1e-4)
    ((part, moved),) = result.moved
    assert (part, moved.name, moved.relfro) == ("model.safetensors", "w", result.floor)


def test_a_last_bit_is_within_the_tolerance_but_not_exact(play):
    outputs = [weights(3.0, 4.0), weights(3.0, math.nextafter(4.0, 5))]
    result = twin(play(*outputs))
    assert result.holds and result.identical == 1 and 0 < result.floor < 1e-15


def test_exact_demands_the_bits(play):
    result = twin(play(weights(3.0, 4.0), weights(3.0, math.nextafter(4.0, 5))), exact=True)
    assert result.failed == ["1 and 2: not the same bits (--exact)"]


def test_the_size_of_a_counter_does_not_hide_the_weights(play):
    def output(w):
        return {"model.safetensors": {"step": ["I64", [], [10**9]], "w": ["F64", [2], [3.0, w]]}}

    result = twin(play(output(4.0), output(4.005)))
    assert not result.holds and result.floor == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("b", "fault"),
    [
        (weights(1, 2, name="v"), "1 tensors missing, the first 'w'"),
        ({"model.safetensors": {"w": ["F64", [2], [1, 2]], "v": ["F64", [1], [0]]}}, "written by one of them only"),
        ({"model.safetensors": {"w": ["F64", [2, 1], [1, 2]]}}, "1 tensors reshaped, the first 'w'"),
        (weights(1, 2, dtype="F32"), "1 tensors retyped, the first 'w'"),
        (weights(1, math.nan), "model.safetensors: no distance, as NaN or infinite on one side only"),
        (weights(1, 2) | {"extra.safetensors": weights(1)["model.safetensors"]}, "extra.safetensors: written by one"),
        (weights(1, 2) | {"notes.txt": "x"}, "notes.txt: written by one of them only"),
    ],
    ids=["renamed", "counter", "reshaped", "retyped", "nan", "a file more", "a text more"],
)
def test_what_cannot_be_compared_is_not_the_same(play, b, fault):
    result = twin(play(weights(1, 2), b))
    assert not result.holds and result.identical == 1 and result.floor == math.inf
    assert any(fault in line for line in result.failed), result.failed


def test_a_zero_reference_has_no_distance(play):
    result = twin(play(weights(0, 0), weights(0, 1e-30)))
    assert result.failed == ["1 and 2: model.safetensors: no distance, as the reference is zero"]


def test_files_that_are_no_checkpoints_are_told_apart_and_gated_on_request(play):
    outputs = [weights(1, 2) | {"log.txt": "a"}, weights(1, 2) | {"log.txt": "b"}]
    result = twin(play(*outputs))
    assert result.holds and result.identical == 2 and result.pairs[0].files == {"log.txt": False}


def test_gated_files(play):
    result = twin(play(weights(1) | {"log.txt": "a"}, weights(1) | {"log.txt": "b"}), gate_files=True)
    assert result.failed == ["1 and 2: log.txt is not the same (--files)"]


def test_checkpoints_are_matched_by_path_and_chosen_by_glob(play):
    def output(early, late):
        return {"at/1.safetensors": {"w": ["F64", [1], [early]]}, "at/2.safetensors": {"w": ["F64", [1], [late]]}}

    command = play(output(1, 2), output(1, 3), output(1, 2), output(1, 3))
    result = twin(command)
    assert result.failed == ["1 and 2: relFro 0.5 is above --tol 1e-05"] and len(result.pairs[0].parts) == 2
    assert twin(command, only=["*/1.safetensors"]).holds


def test_nothing_beside_a_sharded_checkpoint_or_in_a_run_is_passed_over(play):
    index = json.dumps({"weight_map": {"w": "part-1.safetensors"}})

    def wrote(moment):
        part, state = weights(1, 2)["model.safetensors"], weights(moment, name="m")["model.safetensors"]
        return {"m/model.safetensors.index.json": index, "m/part-1.safetensors": part, "m/optimizer.safetensors": state,
                "r/run.json": "{}", "r/export/w.safetensors": state}  # fmt: skip

    result = twin(play(wrote(1.0), wrote(2.0)))
    assert result.identical == 1 and not result.holds
    parts = result.pairs[0].parts
    assert [name for name, c in parts.items() if c.moved] == ["m/optimizer.safetensors", "r/export/w.safetensors"]
    assert [*parts] == ["m/model.safetensors.index.json", "m/optimizer.safetensors", "r/export/w.safetensors"]


def test_control_characters_in_the_name_of_an_output_do_not_reach_the_terminal(play, capsys):
    name = "a\x1b[31m.safetensors"
    assert cli(["twin", "--", *play({name: weights(1)["model.safetensors"]}, weights(1))]) == 1
    assert "\x1b" not in (said := capsys.readouterr().out) and r"a\x1b[31m.safetensors: written by one" in said


def test_nan_in_every_run_is_told(play, capsys):
    assert cli(["twin", "--", *play(weights(math.nan, 1), weights(math.nan, 1))]) == 0
    assert "model.safetensors: 1 NaN and 0 infinite slots in run 1" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--tol", "--min-different", "--timeout"])
def test_limits_are_finite_numbers(option, capsys):
    for number in ("nan", "inf"):
        assert cli(["twin", option, number, "--", "true", "{out}"]) == 2
        assert "not a finite number" in capsys.readouterr().err


def test_what_no_reader_knows_is_equal_only_if_the_files_are(tmp_path):
    def one(content, name):
        path = tmp_path / name
        path.write_bytes(content)
        return Written({"m": Part("m", Checkpoint(path, "torch", {}, unread=("sparse",)))}, {})

    a, same, other = one(b"x", "a"), one(b"x", "b"), one(b"y", "c")
    assert compare_written("1", a, "2", same).faults == []
    pair = compare_written("1", a, "2", other)
    assert not pair.identical and pair.faults == ["m: 'sparse': cannot be read, and the files are not equal"]


def test_hash_order_shows_only_where_the_hash_seed_is_perturbed(program, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    command = program(LEAKY, "{out}")
    assert twin(command).identical == 2
    result = twin(command, perturb=["hash", "schedule", "locale"], exact=True)
    kinds = [r.setting.kind for r in result.repetitions]
    assert kinds[:3] == ["", "", "hash"] and kinds[-2:] == ["schedule", "locale"] and not result.holds
    assert set(result.causes.values()) == {"differs only where PYTHONHASHSEED changed"}
    first = {pair.b: pair.identical for pair in result.pairs if pair.a == "1"}
    assert first["2"] and first[str(result.n)] and first[str(result.n - 1)]


def test_without_a_fixed_hash_seed_the_plain_pair_shows_it(program, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    result = twin(program(LEAKY, "{out}"), reps=5, exact=True)
    assert not result.holds and result.identical < 5


def test_a_variable_is_named_as_the_cause_and_noise_is_not(program, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    command = ["env", "PYTHONHASHSEED=0", *program(LEAKY, "{out}")]
    result = twin(command, perturb=["threads", "LEAK=noise"])
    assert result.holds  # 1e-9 is within the tolerance, and told all the same
    assert list(result.causes.values()) == [
        "differs only where OPENBLAS_NUM_THREADS changed",
        "differs with LEAK=noise, and from itself: a difference that comes and goes",
    ]


def test_plain_noise_is_not_laid_to_a_perturbation(program, monkeypatch):
    monkeypatch.setenv("LEAK", "noise")
    result = twin(program(LEAKY, "{out}"), perturb=["hash"])
    assert list(result.causes.values()) == [
        "the unperturbed runs differ already, so no difference can be laid to a perturbation"
    ]


def test_perturbations_change_their_variables_and_nothing_else():
    environment = {"PYTHONHASHSEED": "4294967295", "OMP_NUM_THREADS": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C",
                   "MLX_BFS_MAX_WIDTH": "3"}  # fmt: skip
    base, perturbed = settings(["all"], environment)
    assert base.variables == {} and [s.kind for s in perturbed] == ["hash", *KINDS]
    for setting in perturbed:
        assert all(environment.get(name) != value for name, value in setting.variables.items())
    assert [s.variables for s in perturbed[:2]] == [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}]
    assert perturbed[2].variables.keys() == set(THREADS)
    assert settings(["hash"], {})[0].variables == {"PYTHONHASHSEED": "0"}, "Python would draw one for each run"
    assert settings(["hash"], {"PYTHONHASHSEED": "random"})[0].variables == {"PYTHONHASHSEED": "0"}
    assert settings(["threads,hash", "X=a,b"], {})[1][-1].variables == {"X": "a,b"}
    for bad in (["hsh"], ["X=1"], [""]):
        with pytest.raises(UsageError, match="--perturb"):
            settings(bad, {"X": "1"})


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ([], UsageError, "no command"),
        (["true"], UsageError, "no argument holds {out}"),
        (["true", "{out}"], UsageError, "repetition 1 wrote no tensors .* it holds nothing"),
        (["sh", "-c", "echo hi > {out}/a.txt"], UsageError, "it holds a.txt"),
        (["no-such-program", "{out}"], UsageError, "'no-such-program' cannot be started: No such file"),
        (["sh", "-c", "echo first; echo the reason >&2; exit 3", "{out}"], Fault, "repetition 1: .* exit code 3; its last lines:\n  first\n  the reason"),
        (["sh", "-c", "kill -9 $$", "{out}"], Fault, "ended by signal SIGKILL; it said nothing"),
        (["sh", "-c", "head -c 40 /dev/zero > {out}/m.safetensors; printf '\\100\\0\\0\\0\\0\\0\\0\\0{\"a\"' > {out}/m.safetensors", "x"], FormatError, "m.safetensors"),
    ],
    ids=["nothing", "no out", "writes nothing", "only text", "no program", "exit 3", "killed", "truncated"],
)  # fmt: skip
def test_a_command_that_gives_nothing_to_compare_is_an_error(command, error, said):
    with pytest.raises(error, match=said):
        twin(command)


def test_a_time_limit_ends_the_command_and_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(Fault, match=r"not done after 0\.5 seconds"):
        twin(["sh", "-c", f"sleep 60 & echo $! >> {pids}; echo $$ >> {pids}; wait; : {{out}}"], timeout=0.5)
    assert all(gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_command_leaves_running_is_ended(play, tmp_path, code):
    pids, command = tmp_path / "pids", shlex.join(play(weights(1), weights(1)))
    line = ["sh", "-c", f"{command}; sleep 60 & echo $! >> {pids}; exit {code}"]
    if code:
        with pytest.raises(Fault):
            twin(line)
    else:
        assert twin(line).holds
    assert all(gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_ends_the_command_and_leaves_nothing(tmp_path, number):
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "mlxdet", "twin", "--", "sh", "-c", f"echo $$ > {pids}; sleep 60; : {{out}}"],
        env=os.environ | {"TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 130, said
    assert gone(int(pids.read_text())) and list(scratch.iterdir()) == []


def gone(pid):
    """Whether a process has ended within a moment."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as file:
            if file.read().split()[2] == "Z":
                return True
        time.sleep(0.02)
    return False


def test_outputs_are_kept_on_request_only_in_a_new_directory(play, tmp_path):
    command = play(weights(1), weights(1))
    twin(command, keep=tmp_path / "kept")
    assert written(tmp_path / "kept" / "1" / "out").parts.keys() == {"model.safetensors"}
    with pytest.raises(UsageError, match=r"--keep: .* name a new directory"):
        twin(command, keep=tmp_path / "kept")


def test_the_command_line_says_what_moved_and_json_is_one_object(play, capsys):
    command = play(weights(3, 4), weights(3, 5), weights(3, 4), weights(3, 5))
    assert cli(["twin", "--", *command]) == 1
    said = capsys.readouterr().out
    assert "identical: 1 of 2" in said and "floor: largest same-command relFro 0.2 (<= 1e-05)" in said
    assert "1 tensor moved, in 1 group" in said and "does not hold: 1 and 2: relFro 0.2 is above --tol 1e-05" in said
    assert cli(["twin", "--json", "--", *command]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False and found["floor"] == pytest.approx(0.2) and found["identical"] == 1
    assert found["moved"] == [{"part": "model.safetensors", "name": "w", "group": "w", "relFro": pytest.approx(0.2)}]


def test_a_bare_perturb_stands_for_all(program, capsys):
    assert cli(["twin", "--json", "--perturb", "--", "env", *program(LEAKY, "{out}")]) == 0
    kinds = {r["kind"] for r in json.loads(capsys.readouterr().out)["repetitions"]}
    assert kinds == {"", *KINDS}


TRAIN = shlex.split("--preset nano --steps 30 --batch 4 --max-lr 3e-2 --val-every 0 --device cpu --out {out}")


def test_mlxdet_train_is_identical_and_another_seed_is_another_model(capsys):
    train = [sys.executable, "-m", "mlxdet", "train", *TRAIN]
    code = cli(["twin", "--json", "--exact", "--files", "--different", " ".join([*train, "--seed", "8"]), "--",
                *train, "--seed", "7"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and (found["identical"], found["n"], found["floor"]) == (2, 2, 0.0)
    assert 1.2 <= found["different"] <= 1.5
    parts = found["pairs"][0]["parts"]
    assert {name.partition(" ")[2] for name in parts} == {
        "(weights)",
        "(first moments)",
        "(second moments)",
        "(counters)",
    }
    assert found["pairs"][0]["files"] == {"metrics.jsonl": True, "validation.jsonl": True}


def test_planted_faults_trip_both_sides_of_the_gate(capsys):
    faults = [sys.executable, "-m", "mlxdet.measure.faults"]
    short = [*TRAIN, "--layers", "1", "--width", "32", "--mlp", "64", "--context", "32", "--steps", "6"]
    race = [*faults, "race", "train", *short, "--seed", "7"]
    assert cli(["twin", "--exact", "--", *race]) == 1
    said = capsys.readouterr().out
    assert "identical: 1 of 2" in said and "does not hold: 1 and 2: not the same bits (--exact)" in said
    ignored = [*faults, "one-seed", "train", *short, "--seed"]
    assert cli(["twin", "--different", " ".join([*ignored, "8"]), "--", *ignored, "7"]) == 1
    assert "this gate could not fail" in capsys.readouterr().out
