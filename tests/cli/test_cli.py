"""The command line as people meet it: help, errors before anything is written, JSON, pipes."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from mlxdet.cli import VERBS, run
from mlxdet.config import FIELDS, flag
from tests.conftest import mlxdet


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A tiny finished run."""
    out = tmp_path_factory.mktemp("cli") / "run"
    done = mlxdet("train", *["--preset", "nano", "--layers", "1", "--width", "16", "--heads", "2", "--mlp", "32", "--context", "16", "--batch", "2", "--steps", "6"],
                  "--save-every", "3", "--data", str(text), "--out", str(out), "--seed", "5")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; from mlxdet.cli import run; run(['--help']);"
        "print(sorted(m for m in ('mlx', 'mlx.core', 'numpy', 'rich', 'sentencepiece') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    began = time.perf_counter()
    assert mlxdet("--help").returncode == 0
    assert time.perf_counter() - began < 3  # 0.15 s on an idle machine; only a loaded library would cost seconds


def test_version_and_no_arguments(capsys):
    assert mlxdet("--version").stdout.startswith("mlxdet ")
    assert run([]) == 2 and "Verbs" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*VERBS, "tokenizer train"])
def test_every_verb_explains_itself_with_an_example(verb, capsys):
    assert run([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    if verb != "tokenizer":
        assert "--json" in said and "--debug" in said and re.search(r"Examples?:\n\s+mlxdet ", said)


def test_train_has_a_flag_for_every_setting(capsys):
    run(["train", "--help"])
    said = capsys.readouterr().out
    for name in FIELDS:
        assert flag(name) + " " in said, name
    for title in ("Text and order:", "Model:", "Steps and optimizer:", "Seeds:"):
        assert title in said


def files(tmp_path):
    """Make the inputs that the errors below speak of; return their names."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"x" * 64)
    (tmp_path / "utf16.txt").write_bytes("hello world, this is text\n".encode("utf-16") * 50)
    (tmp_path / "cp1252.txt").write_bytes(b"fine\nit\x92s not\n" * 200)
    (tmp_path / "folder").mkdir()
    (tmp_path / "no.model").write_text("not a model")
    (tmp_path / "bad.toml").write_text("[optim]\nstep = 3\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")


WRONG = {
    "train --seed -1": "--seed: -1 is out of range|--seed: '-1' is not a seed",
    "train --seed 18446744073709551616": "--seed: 18446744073709551616 is out of range",
    "train --seed 1e3": "--seed: '1e3' is not a seed",
    "train --seed=": "--seed: '' is not a seed",
    "train --seed true": "--seed: 'true' is not a seed",
    "train --init-seed x": "--init-seed: 'x' is not a seed",
    "train --data-seed -3": "--data-seed",
    "train --dtype float64": "--dtype",
    "train --schedule linear": "--schedule",
    "train --order random": "--order",
    "train --kernels fast": "--kernels",
    "train --device tpu": "--device",
    "train --device metal": "--device metal: this is Linux",
    "train --preset giant": "--preset",
    "train --steps 0": "--steps: 0 is too small; the least is 1",
    "train --steps 1.5": "--steps",
    "train --steps -4": "--steps: -4 is too small",
    "train --batch 0": "--batch: 0 is too small",
    "train --dropout 1": "--dropout: 1.0 is too large; it must be below 1",
    "train --max-lr nan": "--max-lr: nan is not a finite number",
    "train --max-lr abc": "--max-lr",
    "train --max-lr -1": "--max-lr: -1.0 is too small",
    "train --width 65": "--width: 65 is not a multiple of --heads 4",
    "train --warmup 2000": "--warmup: 2000 steps of warmup do not fit in --steps 1000",
    "train --val-fraction 1.5": "--val-fraction: 1.5 is too large",
    "train --val-fraction 0.001 --data {d}/cp1252.txt": "validation part of the text is too short",
    "train --keep -1": "--keep: -1 is too small",
    "train --prefetch -1": "--prefetch: -1 is too small",
    "train --prefetch 2 --no-prefetch": "--no-prefetch contradicts --prefetch",
    "train --frobnicate": "No such option",
    "train --lr 3": "No such option",
    "train extra": "unexpected extra argument",
    "train --config {d}/bad.toml": r"bad.toml: unknown key 'step' in \[optim\]",
    "train --config {d}/none.toml": "none.toml: cannot read the config",
    "train --data {d}/none.txt": "none.txt",
    "train --data {d}/empty.txt": "empty.txt",
    "train --data {d}/folder": "folder",
    "train --data {d}/short.txt --preset nano --val-fraction 0": "needs at least 65 tokens, it has 64",
    "train --data {d}/utf16.txt --tokenizer {m}": "utf16.txt.*UTF-16",
    "train --data {d}/cp1252.txt --tokenizer {m}": "cp1252.txt.*line 2",
    "train --tokenizer {d}/no.model": "no.model: not a sentencepiece model",
    "train --tokenizer {d}/folder": "folder: is a directory",
    "train --tokenizer {d}/none.model": "none.model",
    "train --out {d}/used": "used: already there \\(precious.txt\\)",
    "train --out {d}/used --overwrite": "used: already there \\(precious.txt\\)",
    "train --out {d}/file": "file: already there",
    "train --out {d}/file/sub": "cannot make the run directory|already there",
    "resume {d}/none": "none: not a run",
    "resume {d}/used": "used: not a run",
    "resume": "Missing argument",
    "generate {d}/none": "none: not a run",
    "batches {d}/none --step 1": "none: not a run",
    "digest {d}/none": "none",
    "digest {d}/no.model": "no.model",
    "tokenizer train --vocab 3 --out {d}/t.model": "--vocab: 3 is out of range",
    "tokenizer train --data {d}/short.txt --vocab 8000 --out {d}/t.model": "vocab",
    "tokenizer train --vocab 300 --out {d}/file": "file: exists already",
    "tokenizer train --vocab 300 --out {d}/none/t.model": "cannot be written",
    "nonsense": "No such command",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m.model"
    assert run(["tokenizer", "train", "--vocab", "400", "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize("line", WRONG)
def test_wrong_use_is_one_line_exit_2_and_nothing_written(line, tmp_path, model, capfd, monkeypatch):
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts)
    code = run([word.format(d=tmp_path, m=model) for word in line.split()])
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and re.search(WRONG[line], err), err
    assert err.startswith("mlxdet") and len(err.splitlines()) <= 2 and "Traceback" not in err
    assert sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts) == before


def test_debug_shows_the_traceback(capfd):
    assert run(["train", "--seed", "x", "--debug"]) == 2
    assert "Traceback" in capfd.readouterr().err


def test_a_second_training_into_the_same_directory_is_refused_unless_told(trained, text, capfd, tmp_path):
    before = (trained / "metrics.jsonl").read_bytes()
    assert run(["train", "--out", str(trained)]) == 2
    said = capfd.readouterr().err
    assert "already there" in said and "metrics.jsonl" in said and "--overwrite" in said
    assert (trained / "metrics.jsonl").read_bytes() == before
    out = tmp_path / "again"
    args = ["train", *["--preset", "nano", "--layers", "1", "--width", "16", "--mlp", "32", "--context", "16", "--batch", "2", "--steps", "2"], "--data",
            str(text), "--out", str(out)]  # fmt: skip
    assert run(args) == 0 and run([*args, "--seed", "9", "--overwrite"]) == 0
    assert json.loads((out / "run.json").read_text())["config"]["seeds"]["seed"] == 9


def test_print_config_reads_back_and_flags_win_over_the_file(tmp_path, capfd):
    path = tmp_path / "c.toml"
    path.write_text("[optim]\nsteps = 70\nmax_lr = 1e-5\nmin_lr = 0.0\n[model]\npreset = 'nano'\n")
    assert run(["train", "--config", str(path), "--steps", "80", "--print-config"]) == 0
    printed = capfd.readouterr().out
    assert "steps = 80" in printed and "max_lr = 1e-05" in printed and "layers = 2" in printed
    (tmp_path / "d.toml").write_text(printed)
    assert run(["train", "--config", str(tmp_path / "d.toml"), "--print-config"]) == 0
    assert capfd.readouterr().out == printed
    assert run(["train", "--config", str(path), "--print-config", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["optim"]["steps"] == 70


def test_json_is_one_object_on_stdout_and_progress_goes_to_stderr(text, tmp_path):
    done = mlxdet("train", *["--preset", "nano", "--layers", "1", "--width", "16", "--mlp", "32", "--context", "16", "--batch", "2", "--steps", "3"], "--data",
                  str(text), "--out", str(tmp_path / "r"), "--json")  # fmt: skip
    result = json.loads(done.stdout)
    assert result["step"] == 3 and result["stopped"] == "done" and len(result["model_sha256"]) == 64
    assert "step 3/3" in done.stderr


def test_progress_into_a_pipe_is_plain_lines(text, tmp_path):
    done = mlxdet("train", *["--preset", "nano", "--layers", "1", "--width", "16", "--mlp", "32", "--context", "16", "--batch", "2", "--steps", "5"], "--data",
                  str(text), "--out", str(tmp_path / "r"), "--log-every", "1", "--sample-every", "2",
                  PYTHONIOENCODING="ascii:strict", LC_ALL="C")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    steps = [line for line in done.stdout.splitlines() if re.match(r"step \d/5  loss ", line)]
    assert len(steps) == 5 and all("tok/s" in s and "mem" in s and "left" in s for s in steps)


def test_generate_repeats_with_its_seed_and_streams_text(trained, capfd):
    def text(*args):
        assert run(["generate", str(trained), "--tokens", "40", *args]) == 0
        return capfd.readouterr().out

    assert text("--seed", "3") == text("--seed", "3") != text("--seed", "4")
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "9")
    assert text("--prompt", "Hello").startswith("Hello")
    result = json.loads(text("--json", "--step", "3"))
    assert len(result["text"]) <= 40 and result["seed"] == 0


@pytest.mark.parametrize(
    "args, said",
    [(["--prompt", ""], "--prompt"), (["--seed", "x"], "--seed: 'x'"), (["--temperature", "-1"], "--temperature"),
     (["--temperature", "nan"], "--temperature"), (["--step", "4"], "no checkpoint of step 4; it has 3, 6"),
     (["--top-k", "-2"], "--top-k"), (["--tokens", "0"], "--tokens")],
)  # fmt: skip
def test_generate_refuses(trained, capfd, args, said):
    assert run(["generate", str(trained), *args]) == 2
    assert said in capfd.readouterr().err


def test_batches_shows_where_a_steps_rows_come_from(trained, text, capfd):
    assert run(["batches", str(trained), "--step", "4", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][3]
    assert shown["batch"] == logged["batch"] and [r["token"] for r in shown["rows"]] == logged["rows"]
    raw = text.read_bytes()
    for row in shown["rows"]:
        assert row["text"] == raw[row["offset"] : row["offset"] + 17].decode()
        assert row["line"] == raw[: row["offset"]].count(b"\n") + 1 and row["file"].endswith("text.txt")
    assert run(["batches", str(trained), "--step", "4", "--row", "1"]) == 0
    assert "row 1: " in capfd.readouterr().out
    assert run(["batches", str(trained), "--step", "7"]) == 2 and "beyond the run's 6 steps" in capfd.readouterr().err
    assert run(["batches", str(trained), "--step", "4", "--row", "2"]) == 2


def test_digest_is_of_the_content_whatever_the_container(trained, tmp_path, capfd):
    from safetensors.numpy import load_file, save_file

    path = trained / "checkpoints" / "00000006" / "model.safetensors"

    def value(p):
        assert run(["digest", str(p), "--json"]) == 0
        return json.loads(capfd.readouterr().out)["digest"]

    tensors = load_file(path)
    save_file(tensors, tmp_path / "other.bin", metadata={"a": "1", "b": "2"})
    assert (tmp_path / "other.bin").read_bytes() != path.read_bytes() and value(tmp_path / "other.bin") == value(path)
    tensors["norm.bias"] = tensors["norm.bias"] + 1e-6
    save_file(tensors, tmp_path / "moved.bin")
    assert value(tmp_path / "moved.bin") != value(path)
    assert run(["digest", str(path)]) == 0 and str(path) in capfd.readouterr().out


def test_doctor_names_device_blas_and_compiler(capfd):
    assert run(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["decides"]["device"] == "cpu" and found["matmul_gflops"] > 0 and isinstance(found["advice"], list)
    assert run(["doctor", "--device", "cpu"]) == 0 and "decides.mlx" in capfd.readouterr().out


def test_a_reader_that_goes_away_is_no_error(trained):
    command = f"{sys.executable} -m mlxdet generate {trained} --tokens 200 | head -c 5"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert b"Traceback" not in done.stderr and b"defect" not in done.stderr


def test_a_training_goes_on_when_its_reader_goes_away(text, tmp_path):
    flags = "--preset nano --layers 1 --width 16 --mlp 32 --context 16 --batch 2 --steps 9 --log-every 1"
    command = f"{sys.executable} -m mlxdet train {flags} --data {text} --out {tmp_path / 'r'} | head -n 1"
    subprocess.run(["bash", "-c", command], capture_output=True)
    assert (tmp_path / "r" / "checkpoints" / "00000009" / "state.json").exists()


def test_a_non_finite_loss_stops_with_exit_1_and_names_the_rows(text, tmp_path):
    out = tmp_path / "r"
    done = mlxdet("train", *["--preset", "nano", "--layers", "1", "--width", "16", "--mlp", "32", "--context", "16", "--batch", "2", "--steps", "40", "--max-lr", "1e30"],
                  "--min-lr", "1e30", "--warmup", "0", "--grad-clip", "0", "--save-every", "1", "--data", str(text), "--out",
                  str(out))  # fmt: skip
    assert done.returncode == 1 and len(done.stderr.splitlines()) <= 2, done.stderr
    assert re.search(r"step \d+: .*not finite", done.stderr)
    assert not [p for p in (out / "checkpoints").glob("*") if p.name.startswith(".")]


def test_the_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "mlxdet", "--version"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and done.stdout.startswith("mlxdet ")
