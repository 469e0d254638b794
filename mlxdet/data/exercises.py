"""Small exercises made from a seed: reversing, sorting, adding; with right answers, and wrong ones for preferences.

Every question of a set is distinct, and the held-out ones are taken from the same draw, so no row of training is ever
asked in the test. The same arguments give the same bytes on every host.

* reverse  `reverse: gqa` -> `agq`, not `gqa`    3 or 4 letters
* sort     `sort: 5281` -> `1258`, not `5281`    4 to 6 digits
* add      `add: 47+5` -> `52`, not `72`         two numbers below 100; wrong in one digit

The wrong answer repeats what was asked; where that is right (a palindrome), one of its characters is another.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlxdet.data.templates import Renderer, Turn
from mlxdet.errors import UsageError
from mlxdet.seeds import Splitmix64, stream

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Exercise(NamedTuple):
    """A question, its one right answer, and a wrong one of the same length."""

    question: str
    answer: str
    wrong: str


def _text(rng: Splitmix64, alphabet: str, low: int, high: int) -> str:
    return "".join(alphabet[rng.random_int(0, len(alphabet))] for _ in range(rng.random_int(low, high + 1)))


def _reverse(rng: Splitmix64) -> tuple[str, str, str]:
    word = _text(rng, LETTERS, 3, 4)
    return word, word[::-1], word


def _sort(rng: Splitmix64) -> tuple[str, str, str]:
    digits = _text(rng, "0123456789", 4, 6)
    return digits, "".join(sorted(digits)), digits


def _add(rng: Splitmix64) -> tuple[str, str, str]:
    a, b = rng.random_int(0, 100), rng.random_int(0, 100)
    return f"{a}+{b}", str(a + b), str(a + b)


# By name: what draws (what is asked, the answer, a wrong answer unless it is equal), and how many questions there are:
# 26**3 + 26**4; 10**4 + 10**5 + 10**6; 100**2.
TASKS: dict[str, tuple[Callable[[Splitmix64], tuple[str, str, str]], int]] = {
    "reverse": (_reverse, 474_552),
    "sort": (_sort, 1_110_000),
    "add": (_add, 10_000),
}


def _spoilt(answer: str, rng: Splitmix64) -> str:
    """The answer with one of its characters replaced by another of the same alphabet."""
    alphabet = "0123456789" if answer.isdigit() else LETTERS
    at = rng.random_int(0, len(answer))
    shift = rng.random_int(1, len(alphabet))
    return answer[:at] + alphabet[(alphabet.index(answer[at]) + shift) % len(alphabet)] + answer[at + 1 :]


def exercises(task: str, count: int, seed: int) -> list[Exercise]:
    """Return `count` exercises with distinct questions. A longer list starts with the shorter one.

    Raises UsageError for an unknown task, or if more than half of all questions of the task are asked for.
    """
    if task not in TASKS:
        raise UsageError(f"task {task!r}: it is {', '.join(TASKS)}")
    draw, questions = TASKS[task]
    if not 0 <= count <= questions // 2:
        raise UsageError(f"task {task}: {count} exercises; give a number up to {questions // 2}")
    rng, found = Splitmix64(stream(seed, "exercises:" + task)), dict[str, Exercise]()
    while len(found) < count:
        asked, answer, wrong = draw(rng)
        if wrong == answer:
            wrong = _spoilt(answer, rng)
        found.setdefault(asked, Exercise(f"{task}: {asked}", answer, wrong))
    return list(found.values())


def split(task: str, train: int, held_out: int, seed: int) -> tuple[list[Exercise], list[Exercise]]:
    """Return (training, held-out) exercises without a common question. Raises UsageError as `exercises`."""
    found = exercises(task, held_out + train, seed)
    return found[held_out:], found[:held_out]


def instructions(rows: Iterable[Exercise]) -> bytes:
    """Return the rows as JSONL for `SFTCorpus`: {instruction, response}."""
    return _jsonl({"instruction": row.question, "response": row.answer} for row in rows)


def preferences(rows: Iterable[Exercise]) -> bytes:
    """Return the rows as JSONL for `PreferenceCorpus`: {prompt, chosen, rejected}."""
    return _jsonl({"prompt": row.question, "chosen": row.answer, "rejected": row.wrong} for row in rows)


def _jsonl(records: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(folder: str | Path, task: str, train: int, held_out: int, seed: int) -> list[Path]:
    """Write `TASK.jsonl`, `TASK-held-out.jsonl`, and the same as preferences, `TASK-pairs...`, into `folder`."""
    folder, written = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in zip(("", "-held-out"), split(task, train, held_out, seed), strict=True):
        for kind, data in (("", instructions(rows)), ("-pairs", preferences(rows))):
            written.append(folder / f"{task}{kind}{part}.jsonl")
            written[-1].write_bytes(data)
    return written


# (ids of the prompt, how many tokens at most) -> the ids that a model goes on with
Complete = Callable[[np.ndarray, int], Iterable[int]]


def answer(question: str, renderer: Renderer, complete: Complete, limit: int) -> str | None:
    """Return what a model answers, or None if it does not end its answer within `limit` tokens, the marker included."""
    ids: list[int] = []
    for token in complete(renderer.prompt([Turn("user", question)]), limit):
        ids.append(token)
        if ids[-len(renderer.end) :] == renderer.end:
            return renderer.tokenizer.decode(np.array(ids[: -len(renderer.end)], np.int32))
    return None


def exact_match(rows: Sequence[Exercise], renderer: Renderer, complete: Complete, limit: int = 32) -> float:
    """Return the share of exercises that a model answers right, to the character."""
    return sum(answer(row.question, renderer, complete, limit) == row.answer for row in rows) / len(rows)
