"""Exercises: right answers, distinct questions, the same bytes, disjoint parts, a scorer that counts exact answers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxdet.data import exercises
from mlxdet.data.exercises import TASKS, Exercise, exact_match
from mlxdet.data.records import PreferenceCorpus, SFTCorpus
from mlxdet.data.templates import Renderer
from mlxdet.data.tokenizer import load_tokenizer
from mlxdet.errors import UsageError


def solve(question: str) -> str:
    """Another way to the answers."""
    task, rest = question.split(": ")
    if task == "reverse":
        return "".join(reversed(list(rest)))
    if task == "sort":
        return "".join(d * rest.count(d) for d in "0123456789")
    a, b = rest.split("+")
    return f"{int(a) + int(b)}"


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_wrong_ones_are_not_and_questions_are_distinct(task: str) -> None:
    rows = exercises.exercises(task, 2000, 3)
    assert len({row.question for row in rows}) == len(rows) == 2000
    for row in rows:
        assert row.question.startswith(task + ": ") and solve(row.question) == row.answer
        assert row.wrong != row.answer and len(row.wrong) == len(row.answer)
        spoilt = sum(a != b for a, b in zip(row.wrong, row.answer, strict=True)) == 1
        repeated = row.question == f"{task}: {row.wrong}"
        asked = row.question.removeprefix(f"{task}: ")
        assert repeated or (spoilt and (task == "add" or asked == row.answer))
    lengths = {len(row.answer) for row in rows}
    assert lengths == {"reverse": {3, 4}, "sort": {4, 5, 6}, "add": {1, 2, 3}}[task]


@pytest.mark.parametrize("task", TASKS)
def test_held_out_questions_are_never_trained_and_stay_when_training_grows(task: str) -> None:
    train, held_out = exercises.split(task, 1000, 100, 0)
    assert (len(train), len(held_out)) == (1000, 100)
    assert not {row.question for row in train} & {row.question for row in held_out}
    assert exercises.split(task, 3000, 100, 0)[1] == held_out
    assert exercises.split(task, 1000, 100, 1)[1] != held_out


def test_written_files_are_pinned_and_every_row_is_used(tmp_path: Path) -> None:
    digests = {}
    for task in TASKS:
        for path in exercises.write(tmp_path, task, 300, 40, 7):
            raw = path.read_bytes()
            digests[path.name] = hashlib.sha256(raw).hexdigest()[:16]
            kind = PreferenceCorpus if "pairs" in path.name else SFTCorpus
            corpus = kind([str(path)], template="plain", context=64)
            assert len(corpus) == corpus.rows == (40 if "held-out" in path.name else 300)
            assert corpus.longest <= 31
            assert set(json.loads(raw.split(b"\n")[0])) == (
                {"prompt", "chosen", "rejected"} if kind is PreferenceCorpus else {"instruction", "response"}
            )
    assert digests == PINNED


PINNED = {
    "reverse.jsonl": "669e51ba7139221d",
    "reverse-pairs.jsonl": "5bed7d2a0be2a749",
    "reverse-held-out.jsonl": "35352b0248d26290",
    "reverse-pairs-held-out.jsonl": "9e66490050451f17",
    "sort.jsonl": "ad759f8b8e0b7b3b",
    "sort-pairs.jsonl": "b62ffc283a094a19",
    "sort-held-out.jsonl": "24fa10e5d9e461dd",
    "sort-pairs-held-out.jsonl": "f5215f5d21a38cc6",
    "add.jsonl": "a2d039d1671da7b0",
    "add-pairs.jsonl": "579513882cc0e77f",
    "add-held-out.jsonl": "67b81672bf4eef1d",
    "add-pairs-held-out.jsonl": "103aa2c19f886072",
}


@pytest.mark.parametrize(("task", "count"), [("reverse", -1), ("add", 5001), ("multiply", 1)])
def test_what_cannot_be_made_is_refused(task: str, count: int) -> None:
    with pytest.raises(UsageError, match=f"task .*{task}"):
        exercises.exercises(task, count, 0)


class Model:
    """Answers from a table of texts, byte by byte, and goes on after the end."""

    def __init__(self, renderer: Renderer, table: dict[str, str]):
        self.renderer, self.table = renderer, table

    def __call__(self, prompt: np.ndarray, limit: int) -> Any:
        said = self.table[self.renderer.tokenizer.decode(prompt)]
        yield from self.renderer.tokenizer.encode(said + "zzzz").tolist()[:limit]


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_exact_match_counts_whole_answers_that_end(template: str) -> None:
    renderer = Renderer(template, load_tokenizer(None))
    end = renderer.tokenizer.decode(np.array(renderer.end, np.int32))
    rows = [Exercise(f"sort: {i}", str(i), "x") for i in range(5)]
    prompts = [renderer.tokenizer.decode(renderer.prompt([exercises.Turn("user", row.question)])) for row in rows]
    said = [f"0{end}", f"1 {end}", "2", f"{end}3", f"4{end}{end}"]  # right, a space more, no end, nothing, right
    model = Model(renderer, dict(zip(prompts, said, strict=True)))
    assert [exercises.answer(row.question, renderer, model, 40) for row in rows] == ["0", "1 ", None, "", "4"]
    assert exact_match(rows, renderer, model) == 0.4
    assert exact_match(rows[:1], renderer, model, limit=1 + len(renderer.end)) == 1.0
    assert exact_match(rows[:1], renderer, model, limit=len(renderer.end)) == 0.0  # no room for the end marker
