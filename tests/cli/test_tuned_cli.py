"""The verbs on conversations and preferences: what they print and where they stop."""

import json

import pytest

from mlxdet.cli import run
from mlxdet.data import exercises
from mlxdet.training.run import Run
from mlxdet.training.write import completer

SHAPE = "--preset nano --layers 1 --width 16 --mlp 32 --context 32 --device cpu --val-every 0"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(directory, an sft run, a dpo run with adapters on it)."""
    where = tmp_path_factory.mktemp("tuned")
    exercises.write(where, "reverse", 40, 4, 0)
    flags = [
        *SHAPE.split(),
        "--objective",
        "sft",
        "--data",
        str(where / "reverse.jsonl"),
        "--batch",
        "3",
        "--steps",
        "4",
    ]
    assert run(["train", *flags, "--out", str(where / "sft")]) == 0
    flags = ["--device", "cpu", "--objective", "dpo", "--data", str(where / "reverse-pairs.jsonl"), "--from", str(where / "sft"),
             "--lora-rank", "2", "--batch", "2", "--accumulation", "2", "--steps", "3", "--max-lr", "0.01"]  # fmt: skip
    assert run(["train", *flags, "--out", str(where / "dpo")]) == 0
    return where


def said(capfd, *args):
    assert run([*map(str, args)]) == 0
    return capfd.readouterr().out


def refused(capfd, *args):
    assert run([*map(str, args)]) == 2
    shown = capfd.readouterr()
    assert not shown.out and "Traceback" not in shown.err
    return shown.err


def test_batches_shows_rows_with_what_is_scored_underlined(tuned, capfd):
    lines = said(capfd, "batches", tuned / "sft", "--step", "2").splitlines()
    assert lines[0].startswith("step 2: 3 rows in 3 windows of 24 tokens, ") and len(lines) == 10
    rows = [json.loads(line) for line in (tuned / "reverse.jsonl").read_text().splitlines()]
    shown = json.loads(said(capfd, "batches", tuned / "sft", "--step", "2", "--json"))
    for i, row in enumerate(shown["rows"]):
        source = rows[row["line"] - 1]
        assert [p["scored"] for p in row["parts"]] == [False, True]
        assert [p["text"] for p in row["parts"]] == [source["instruction"] + "\n", source["response"] + "</s>"]
        text, marks = lines[3 * i + 2 : 3 * i + 4]
        assert text == f"  {source['instruction']}\\n{source['response']}</s>"
        assert marks == "  " + " " * (len(source["instruction"]) + 2) + "^" * (len(source["response"]) + 4)
    assert sum(p["tokens"] for r in shown["rows"] for p in r["parts"] if p["scored"]) == int(lines[0].split()[10])
    assert said(capfd, "batches", tuned / "sft", "--step", "2", "--row", "1").splitlines()[1:] == lines[4:7]
    assert "not one of the 3 rows" in refused(capfd, "batches", tuned / "sft", "--step", "2", "--row", "3")


def test_batches_shows_both_answers_of_a_pair(tuned, capfd):
    shown = json.loads(said(capfd, "batches", tuned / "dpo", "--step", "1", "--json"))["rows"]
    assert [(r["side"], r["window"]) for r in shown] == [("chosen", 0), ("chosen", 1), ("rejected", 2), ("rejected", 3),
                                                         ("chosen", 4), ("chosen", 5), ("rejected", 6), ("rejected", 7)]  # fmt: skip
    for a, b in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert shown[a]["line"] == shown[b]["line"] and shown[a]["parts"][0] == shown[b]["parts"][0]
        assert shown[a]["parts"][1] != shown[b]["parts"][1]


def test_ask_uses_the_template_and_prompt_does_not(tuned, capfd):
    asked = said(capfd, "generate", tuned / "sft", "--ask", "reverse: abc", "--temperature", "0", "--tokens", "5")
    complete = completer(Run(tuned / "sft"))
    want = bytes(complete(list(b"reverse: abc\n"), 5)).decode("utf-8", "replace")
    assert asked == want.split("</s>")[0] + "\n"
    shown = json.loads(said(capfd, "generate", tuned / "dpo", "--prompt", "reverse: abc", "--temperature", "0", "--json",
                            "--tokens", "5"))  # fmt: skip
    assert shown["prompt"] == "reverse: abc" and "ask" not in shown
    assert "does not go together" in refused(capfd, "generate", tuned / "sft", "--ask", "x", "--prompt", "y")
    assert "leaves no answer" in refused(capfd, "generate", tuned / "sft", "--ask", "x" * 40)
    assert "spells a marker" in refused(capfd, "generate", tuned / "sft", "--ask", "x</s>")
    assert "--ask: give at least one character" in refused(capfd, "generate", tuned / "sft", "--ask", "")


def test_merge_writes_a_file_that_digest_and_check_read(tuned, tmp_path, capfd):
    out = tmp_path / "m.safetensors"
    shown = json.loads(said(capfd, "merge", tuned / "dpo", "--out", out, "--json"))
    assert said(capfd, "digest", out).split()[0] == shown["digest"] and shown["step"] == 3
    assert "already there" in refused(capfd, "merge", tuned / "dpo", "--out", out)
    again = said(capfd, "merge", tuned / "dpo", "--out", out, "--overwrite")
    assert f"sha256 {shown['sha256']}" in again and shown["digest"] in again
    assert "nothing to merge" in refused(capfd, "merge", tuned / "sft", "--out", tmp_path / "n.safetensors")
    assert "no checkpoint of step 2" in refused(capfd, "merge", tuned / "dpo", "--out", tmp_path / "n", "--step", "2")
    assert "no such directory" in refused(capfd, "merge", tuned / "dpo", "--out", tmp_path / "x" / "y")


def test_other_verbs_read_a_tuned_run(tuned, capfd):
    assert "3 of 3 logged steps reproduced" in said(capfd, "replay", tuned / "dpo", "--step", "3")
    assert "no spike" in said(capfd, "spikes", tuned / "dpo")
    assert "identical" in said(capfd, "diverge", tuned / "dpo", tuned / "dpo")
    assert "investigate is for new models on text" in refused(capfd, "investigate", tuned / "dpo", "--step", "2")
    assert "Nothing can race" in said(capfd, "audit", "--objective", "dpo", "--from", tuned / "sft", "--lora-rank", "2")
    shown = json.loads(said(capfd, "train", "--from", tuned / "sft", "--print-config", "--json"))
    assert shown["model"]["width"] == 16 and shown["tune"]["base"] == str(tuned / "sft")


def test_every_bad_row_is_listed_and_nothing_is_made(tuned, tmp_path, capfd):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"instruction": "a", "response": "b"}\n{"instruction": "a"}\nnot json\n{"messages": []}\n')
    err = refused(capfd, "train", "--objective", "sft", "--data", bad, "--out", tmp_path / "run", "--device", "cpu")
    assert all(f"bad.jsonl:{n}: " in err for n in (2, 3, 4)) and "bad.jsonl:1:" not in err
    assert not (tmp_path / "run").exists()
