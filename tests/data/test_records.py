"""What a row means: each form, each fault by name, and what happens to rows that do not fit."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxdet.data.jsonl import BadRows
from mlxdet.data.records import KINDS, IOSampler, PreferenceCorpus, RecordCorpus, SFTCorpus
from mlxdet.errors import UsageError


def save(folder: Path, *rows: Any) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(cls: type[RecordCorpus], folder: Path, *rows: Any, **settings: Any) -> RecordCorpus:
    return cls([save(folder, *rows)], **({"template": "plain", "context": 64} | settings))


def spelled(corpus: RecordCorpus, i: int = 0) -> list[str]:
    """The text of a sample, scored tokens in braces."""
    found = []
    for ids, scored in corpus.sample(i):
        edges = np.flatnonzero(np.diff([0, *scored.astype(int), 0]))
        pieces = np.split(ids, edges)
        found.append("".join(f"{{{corpus.decode(p)}}}" if k % 2 else corpus.decode(p) for k, p in enumerate(pieces)))
    return found


def message(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


U, A, S = message("user", "Q"), message("assistant", "A"), message("system", "S")


@pytest.mark.parametrize(
    ("cls", "row", "want"),
    [
        (IOSampler, {"input": "Q", "output": "A"}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"messages": [U, A]}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"messages": [S, U, A, U, A]}, ["S\n\nQ\n{A</s>}\nQ\n{A</s>}"]),
        (SFTCorpus, {"messages": [U, A, U]}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"messages": [U, A], "prompt": "other"}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"messages": [U, A], "completion": None}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"messages": [message("user", "Q", tool_calls=[]), A], "tools": []}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"prompt": "Q", "completion": "A"}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"prompt": [S, U, A, U], "completion": [A]}, ["S\n\nQ\nA</s>\nQ\n{A</s>}"]),
        (SFTCorpus, {"instruction": "Q", "response": "A"}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"instruction": "Q", "input": "X", "response": "A"}, ["Q\n\nX\n{A</s>}"]),
        (SFTCorpus, {"instruction": "Q", "input": "", "response": "A"}, ["Q\n{A</s>}"]),
        (SFTCorpus, {"instruction": "Q", "input": None, "response": "A"}, ["Q\n{A</s>}"]),
        (PreferenceCorpus, {"prompt": "Q", "chosen": "A", "rejected": "B"}, ["Q\n{A</s>}", "Q\n{B</s>}"]),
        (
            PreferenceCorpus,
            {"prompt": [S, U, A, U], "chosen": [A], "rejected": "B"},
            ["S\n\nQ\nA</s>\nQ\n{A</s>}", "S\n\nQ\nA</s>\nQ\n{B</s>}"],
        ),
        (PreferenceCorpus, {"prompt": "Q", "chosen": [U, A], "rejected": [U, message("assistant", "B")]}, ["Q\n{A</s>}", "Q\n{B</s>}"]),
        (IOSampler, {"input": "", "output": "A"}, ["\n{A</s>}"]),
        (IOSampler, {"input": "a\nb\u2028c\x00", "output": " \n"}, ["a\nb\u2028c\x00\n{ \n</s>}"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_forms(cls: type[RecordCorpus], row: dict[str, Any], want: list[str], kind: str, model: Path, tmp_path: Path) -> None:  # fmt: skip
    """The same texts and the same borders of what is scored, in both kinds of vocabulary."""
    tokenizer = None if kind == "bytes" else str(model)
    corpus = make(cls, tmp_path, row, tokenizer=tokenizer)
    got = spelled(corpus)
    if kind == "sentencepiece":  # its </s> is a control token without text
        want = [text.replace("</s>", "") for text in want]
    assert got == want and len(corpus.conversation(0)) == corpus.sides == len(want)


MESSAGES_SAY = [
    ({"messages": "Q"}, "field 'messages' must be a list of messages, not a string"),
    ({"messages": []}, "field 'messages' is an empty list; a conversation needs a message"),
    ({"messages": [U, "A"]}, "messages[1]: a message must be an object {role, content}, not a string"),
    ({"messages": [U, {"role": "assistant"}]}, "messages[1]: field 'content' is missing"),
    ({"messages": [{"content": "Q"}, A]}, "messages[0]: field 'role' is missing"),
    ({"messages": [U, message("assistant", None)]}, "messages[1]: field 'content' must be a string, not null"),
    ({"messages": [message("user", [{"type": "text", "text": "Q"}]), A]},
     "messages[0]: field 'content' must be a string, not a list (content in parts is not supported)"),
    ({"messages": [message("user", {"text": "Q"}), A]}, "messages[0]: field 'content' must be a string, not an object"),
    ({"messages": [message(1, "Q"), A]}, "messages[0]: field 'role' must be a string, not a number"),
    ({"messages": [message("human", "Q"), A]}, "messages[0]: role 'human' is not supported; roles are system, user, assistant"),
    ({"messages": [U, message("tool", "7"), A]}, "messages[1]: role 'tool' is not supported"),
    ({"messages": [U, message("assistant", "A", tool_calls=[{"id": 1}])]}, "messages[1]: field 'tool_calls' would change what the row means, and is not supported; remove it"),
    ({"messages": [U, A], "tools": [{"name": "f"}]}, "field 'tools' would change what the row means"),
    ({"messages": [U, message("assistant", "A", weight=0)]}, "messages[1]: field 'weight' would change what the row means"),
    ({"messages": [S, U]}, "field 'messages' has no assistant message, so there is nothing to learn"),
    ({"messages": [U, U, A]}, "messages[1]: template plain has no place for a turn of role 'user' after a turn of role 'user'"),
    ({"messages": [A, U, A]}, "messages[0]: template plain has no place for a turn of role 'assistant' at the start"),
    ({"messages": [message("user", "\ud800"), A]}, "messages[0]: field 'content': character 1 is half of a surrogate pair"),
    ({"messages": [U, A], "response": "A"}, "fields 'messages', 'response' each hold an answer; keep one"),
    ({"prompt": "Q"}, "field 'completion' is missing (it has 'prompt'; a row is {messages} or {prompt, completion} or {instruction, response})"),
    ({"instruction": "Q", "input": "X", "output": "A"}, "field 'response' is missing"),
    ({"completion": "A"}, "field 'prompt' is missing"),
    ({"prompt": None, "completion": "A"}, "field 'prompt' must be a string, not null"),
    ({"prompt": "Q", "completion": None}, "field 'completion' must be a string, not null"),
    ({"prompt": "Q", "completion": [U]}, "field 'completion' must hold one assistant message, alone or after the prompt"),
    ({"prompt": "Q", "completion": [message("user", "other"), A]}, "field 'completion' must hold one assistant message"),
    ({"instruction": "Q", "input": 3, "response": "A"}, "field 'input' must be a string, not a number"),
    ({"text": "Q"}, "field 'messages' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "says"), MESSAGES_SAY)
def test_what_is_wrong_with_a_conversation_is_named(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    good = {"messages": [U, A]}
    with pytest.raises(BadRows) as caught:
        make(SFTCorpus, tmp_path, good, row, good)
    assert caught.value.count == 1
    assert str(caught.value).startswith(f"{tmp_path}/train.jsonl:2: {says}")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Q", "chosen": "A"}, "field 'rejected' is missing"),
        ({"chosen": "A", "rejected": "B"}, "field 'prompt' is missing"),
        ({"prompt": "Q", "chosen": "A", "rejected": None}, "field 'rejected' must be a string, not null"),
        ({"prompt": "Q", "chosen": [A, U], "rejected": "B"}, "field 'chosen' must hold one assistant message"),
        ({"prompt": "Q", "chosen": [U, A, U, A], "rejected": "B"}, "field 'chosen' must hold one assistant message"),
        ({"prompt": "Q", "chosen": {"content": "A"}, "rejected": "B"}, "field 'chosen' must be a string, not an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pair_is_named(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadRows) as caught:
        make(PreferenceCorpus, tmp_path, row)
    assert str(caught.value).startswith(f"{tmp_path}/train.jsonl:1: {says}")


def test_fields_that_are_not_used_are_counted(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [message("user", "Q", name="n"), message("assistant", "A", name="m", tool_calls=[])],
            "source": "x",
            "prompt": "Q",
        },
        {"instruction": "Q", "input": "", "response": "A", "id": 3},
    ]
    counted = {"id": 1, "prompt": 1, "source": 1, "messages[].name": 1, "messages[].tool_calls": 1}
    assert make(SFTCorpus, tmp_path, *rows).describe()["ignored_fields"] == counted
    many = [{"input": "Q", "output": "A", f"f{i}": 0} for i in range(150)]
    counted = make(IOSampler, tmp_path, *many).describe()["ignored_fields"]
    assert sum(counted.values()) == 150 and len(counted) == 101 and counted["(others)"] == 50


# Lengths: "Q\nA</s>" is 7 tokens, of which the 5 from index 2 on are scored. Context c holds c + 1 tokens.


@pytest.mark.parametrize(
    ("context", "truncate", "want"),
    [
        (7, False, "Q\n{A</s>}"),
        (6, False, "Q\n{A</s>}"),  # exactly
        (5, False, "too long"),  # one token of the end marker does not fit
        (5, True, "Q\n{A</s}"),
        (4, True, "Q\n{A</}"),
        (2, True, "Q\n{A}"),  # the first token of the answer is the last of the row
        (1, True, "prompt too long"),  # the answer starts where the row ends
        (1, False, "prompt too long"),
    ],
)
def test_truncation_at_each_boundary(context: int, truncate: bool, want: str, tmp_path: Path) -> None:
    short = {"input": "", "output": "", "x": 0}  # keeps the file from having no row that could be understood
    try:
        corpus = make(IOSampler, tmp_path, short, {"input": "Q", "output": "A"}, context=context, truncate=truncate)
    except UsageError as error:
        assert f"1 {want}" in str(error) and "no row is left of 2: 1 empty answer, " in str(error)
        assert f"The longest has 7 tokens, a context of {context} holds {context + 1}; raise --context" in str(error)
        return
    assert spelled(corpus) == [want] and corpus.lengths.tolist() == [len(want) - 2]
    assert corpus.describe()["truncated"] == int(context < 6)
    assert corpus.scored.tolist() == [len(want) - 4] and corpus.longest == 7


def test_a_truncated_conversation_keeps_what_fits(tmp_path: Path) -> None:
    """Q\\nA</s>\\nQ\\nA</s>: 15 tokens; at 8 to 10 only the first answer is left, whole."""
    row = {"messages": [U, A, U, A]}
    want = {14: "Q\n{A</s>}\nQ\n{A</s>}", 13: "Q\n{A</s>}\nQ\n{A</s}", 10: "Q\n{A</s>}\nQ\n{A}", 9: "Q\n{A</s>}\nQ\n",
            7: "Q\n{A</s>}\n", 6: "Q\n{A</s>}"}  # fmt: skip
    for context, text in want.items():
        assert spelled(make(SFTCorpus, tmp_path, row, context=context, truncate=True)) == [text]


def test_rows_that_do_not_fit_are_dropped_counted_and_listed(tmp_path: Path, warned: list[str]) -> None:
    rows = [{"input": "Q", "output": "A" * n} for n in (1, 5, 90, 1, 200, 1, 90, 1, 1)]
    rows += [{"input": "Q" * 64, "output": "A"}, {"input": "Q" * 63, "output": "A"}, {"input": "Q", "output": ""}]
    rows += [{"input": "Q</s>", "output": "A"}, {"input": "Q", "output": "a</s>b"}]
    corpus = make(IOSampler, tmp_path, *rows)
    record = corpus.describe()
    assert (record["rows"], record["kept"], record["longest"], record["truncated"]) == (14, 6, 206, 0)
    assert record["dropped"] == {"empty answer": 1, "text spells a marker": 2, "prompt too long": 1, "too long": 4}
    where = [(os.path.basename(d.place), d.reason, d.tokens) for d in corpus.dropped()]
    assert where == [
        ("train.jsonl:3", "too long", 96),
        ("train.jsonl:5", "too long", 206),
        ("train.jsonl:7", "too long", 96),
        ("train.jsonl:10", "prompt too long", 70),
        ("train.jsonl:11", "too long", 69),
        ("train.jsonl:12", "empty answer", 6),
        ("train.jsonl:13", "text spells a marker", 11),
        ("train.jsonl:14", "text spells a marker", 12),
    ]
    assert corpus.kept.tolist() == [0, 1, 3, 5, 7, 8]
    assert [corpus.where(int(row)).line for row in corpus.kept] == [1, 2, 4, 6, 8, 9]
    summary = (
        "6 of 14 rows kept, 1 dropped (empty answer), 2 dropped (text spells a marker), 1 dropped (prompt too long), "
        "4 dropped (too long); the longest has 206 tokens, a context of 64 holds 65"
    )
    assert corpus.summary() == summary and warned == [f"{tmp_path}/train.jsonl: {summary}"], "once"
    cut = make(IOSampler, tmp_path, *rows, truncate=True)
    assert "10 of 14 rows kept" in warned[1] and "4 truncated;" in warned[1]
    assert (cut.describe()["truncated"], len(cut)) == (4, 10) and "too long" not in cut.describe()["dropped"]
    assert cut.lengths.max() == 65 and cut.scored.min() == 1
    for i in range(len(cut)):
        assert len(cut.sample(i)[0].ids) == cut.lengths[i] and cut.sample(i)[0].scored.sum() == cut.scored[i]


def test_a_five_megabyte_row_is_one_dropped_row(tmp_path: Path) -> None:
    corpus = make(IOSampler, tmp_path, {"input": "Q", "output": "x" * 5_000_000}, {"input": "Q", "output": "A"})
    assert corpus.describe()["dropped"] == {"too long": 1} and corpus.longest == 5_000_006


def test_no_row_left_is_an_error_with_numbers(tmp_path: Path) -> None:
    rows = (
        [{"input": "Q", "output": "A" * 100}] * 3
        + [{"input": "Q", "output": ""}]
        + [{"input": "Q" * 70, "output": "A"}]
    )
    with pytest.raises(UsageError) as caught:
        make(IOSampler, tmp_path, *rows)
    assert str(caught.value) == (
        f"{tmp_path}/train.jsonl: no row is left of 5: 1 empty answer, 1 prompt too long, 3 too long. The longest has "
        f"106 tokens, a context of 64 holds 65; raise --context, or give --truncate to cut long rows"
    )


@pytest.mark.parametrize(
    ("row", "truncate", "reason"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, False, "chosen equals rejected"),
        ({"prompt": "Q", "chosen": "", "rejected": "A"}, False, "empty answer"),
        ({"prompt": "Q", "chosen": "A", "rejected": ""}, True, "empty answer"),
        ({"prompt": "Q" * 20, "chosen": "A", "rejected": "B"}, True, "prompt too long"),
        ({"prompt": "Q" * 16, "chosen": "A", "rejected": "B"}, True, "prompt too long"),  # 17 before the answer, 17 fit
        ({"prompt": "Q", "chosen": "A", "rejected": "B" * 20}, False, "too long"),
        ({"prompt": "Q", "chosen": "A" * 20, "rejected": "B"}, False, "too long"),
        ({"prompt": "Q", "chosen": "A" * 20, "rejected": "A" * 21}, True, "equal once truncated"),
        ({"prompt": "Q", "chosen": "A</s>", "rejected": "B"}, True, "text spells a marker"),
    ],
)
def test_pairs_without_a_preference_are_dropped(row: dict[str, Any], truncate: bool, reason: str, tmp_path: Path) -> None:  # fmt: skip
    good = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    corpus = make(PreferenceCorpus, tmp_path, row, good, context=16, truncate=truncate)
    assert corpus.describe()["dropped"] == {reason: 1} and len(corpus) == 1
    assert spelled(corpus) == ["Q\n{A</s>}", "Q\n{B</s>}"]
    with pytest.raises(UsageError, match=f"no row is left of 1: 1 {reason}"):
        make(PreferenceCorpus, tmp_path, row, context=16, truncate=truncate)


def test_each_answer_of_a_pair_is_cut_alone(tmp_path: Path) -> None:
    row = {"prompt": "Q" * 15, "chosen": "A", "rejected": "B" * 20}
    corpus = make(PreferenceCorpus, tmp_path, row, context=16, truncate=True)
    assert spelled(corpus) == ["Q" * 15 + "\n{A}", "Q" * 15 + "\n{B}"]
    assert corpus.describe()["truncated"] == 1


def test_a_last_turn_without_an_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    corpus = make(SFTCorpus, tmp_path, {"messages": [U, A, U]}, {"messages": [U, A]})
    assert corpus.describe()["unanswered"] == 1 and spelled(corpus, 0) == spelled(corpus, 1)


def test_unknown_tokens_are_counted_and_limited(lossy: Path, tmp_path: Path) -> None:
    path = save(tmp_path, {"input": "the cold day", "output": "\u4e00\u4e8c\u4e09"})
    with pytest.raises(UsageError, match="has no tokens for"):
        SFTCorpus([path], str(lossy), template="chatml", context=64)
    from mlxdet.data import templates

    plain = templates.TEMPLATES["plain"]
    spaced = templates.Template("spaced", plain.markers, {k: v.replace("\n", "def") for k, v in plain.before.items()}, "</s>")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(templates.TEMPLATES, "spaced", spaced)
        with pytest.raises(UsageError, match=r"of \d+ tokens \(.*%\) are unknown .* raise --unk-limit"):
            IOSampler([path], str(lossy), template="spaced", context=64)
        corpus = IOSampler([path], str(lossy), template="spaced", context=64, unk_limit=1.0)
    assert corpus.describe()["tokenizer"]["unknown"] >= 1


@pytest.mark.parametrize("cls", KINDS.values())
def test_ids_are_within_the_vocabulary_and_the_record_is_plain_json(
    cls: type[RecordCorpus], model: Path, tmp_path: Path
) -> None:
    row = {"input": "Q é", "output": "日本", "prompt": "Q é", "chosen": "日", "rejected": "本", "completion": "😀"}
    for tokenizer in (None, str(model)):
        corpus = make(cls, tmp_path, row, tokenizer=tokenizer)
        assert all(part.ids.min() >= 0 and part.ids.max() < corpus.vocab_size for part in corpus.sample(0))
        record = corpus.describe()
        assert json.loads(json.dumps(record)) == record and record["kind"] == cls.kind
        assert record["tokens"] == sum(len(part.ids) for part in corpus.sample(0))
        assert record["scored"] == sum(int(part.scored.sum()) for part in corpus.sample(0))


def test_the_digest_sees_the_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template or tokenizer that spells a row in another way (a date in it, a new version) changes the digest."""
    from mlxdet.data import templates

    row = {"input": "Q", "output": "A"}
    first = make(IOSampler, tmp_path, row)
    plain = templates.TEMPLATES["plain"]
    dated = templates.Template("plain", plain.markers, {**plain.before, ("", "user"): "2026-11-30 "}, plain.end)
    monkeypatch.setitem(templates.TEMPLATES, "plain", dated)
    assert make(IOSampler, tmp_path, row).digest != first.digest
    monkeypatch.undo()
    assert make(IOSampler, tmp_path, row).digest == first.digest
    assert make(IOSampler, tmp_path, row, tokenizer=str(model)).digest != first.digest
