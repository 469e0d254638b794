"""Every line of a file of rows is used, counted as dropped, or named with what is wrong."""

import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxdet.data import jsonl, parquet
from mlxdet.data.jsonl import BadRows, JsonLines, RowError, parse
from mlxdet.data.records import KINDS, IOSampler, RecordCorpus
from mlxdet.data.sources import Source
from mlxdet.errors import MlxdetError, UsageError

GOOD = b'{"input": "Q", "output": "A"}'


def write(folder: Path, data: bytes, name: str = "train.jsonl") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def load(folder: Path, data: bytes) -> IOSampler:
    return IOSampler([write(folder, data)], template="plain", context=64)


def texts(corpus: RecordCorpus) -> list[str]:
    return [corpus.decode(part.ids) for i in range(len(corpus)) for part in corpus.sample(i)]


def problems(folder: Path, data: bytes) -> list[str]:
    with pytest.raises(BadRows) as caught:
        load(folder, data)
    return [line.removeprefix(f"{folder}/") for line in str(caught.value).split("\n")]


def test_lines_count_blank_ones_and_all_problems_come_at_once(tmp_path: Path) -> None:
    data = b"\n".join([GOOD, b"", b" \t ", b'{"input": "Q", ', GOOD, b"[1]", b"7", b"null", b'{"input": "Q"}', GOOD])
    assert [line.split(": ", 1)[0] for line in problems(tmp_path, data)] == [
        f"train.jsonl:{n}" for n in (4, 6, 7, 8, 9)
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b'{"input": "Q", "output": "A",}', "not JSON: "),
        (b'{"input": "Q"', "not JSON: "),
        (b"{'input': 'Q'}", "not JSON: "),
        (b'{"input": "Q", "output": "A"} {}', "not JSON: extra data (character 31)"),
        (b'{"input": "a\x00b", "output": "A"}', "not JSON: invalid control character at (character 13)"),
        (b'{"input": "Q", "output": NaN}', "not JSON: NaN is no JSON value"),
        (b'{"input": "Q", "output": -Infinity}', "not JSON: -Infinity is no JSON value"),
        (b'{"input": "Q", "input": "R", "output": "A"}', "field 'input' appears twice in one object"),
        (b'{"input": "Q", "output": "A", "x": {"\\u001b": 1, "\\u001b": 2}}', r"field '\x1b' appears twice"),
        (b"[" * 200_000, "not usable: nested too deeply"),
        (b'{"input": ' + b"9" * 5000 + b"}", "not usable: a number with too many digits"),
        (b'["Q", "A"]', "a row must be an object with named fields, not a list"),
        (b"null", "a row must be an object with named fields, not null"),
        (b"1.5", "a row must be an object with named fields, not a number"),
        (b"true", "a row must be an object with named fields, not true or false"),
        (b'"Q"', "a row must be an object with named fields, not a string"),
        (b'{"input": "Q"}', "field 'output' is missing (it has 'input'; a row is {input, output})"),
        (b"{}", "field 'input' is missing (it has none; a row is {input, output})"),
        (b'{"input": null, "output": "A"}', "field 'input' must be a string, not null"),
        (b'{"input": "Q", "output": null}', "field 'output' must be a string, not null"),
        (b'{"input": 7, "output": "A"}', "field 'input' must be a string, not a number"),
        (b'{"input": "Q", "output": ["A"]}', "field 'output' must be a string, not a list"),
        (b'{"input": "Q", "output": "\\ud83d"}', "field 'output': character 1 is half of a surrogate pair"),
        (b'{"input": "Q", "output": "\\udc92"}', "field 'output': character 1 is half of a surrogate pair"),
        (b'{"input": "it\x92s", "output": "A"}', "not UTF-8: byte 0x92 at byte offset 44 of the file"),
        (b'{"input": "Q", "output": "\xe2\x82', "not UTF-8: byte 0xe2 at byte offset 57 of the file"),
        (b'\xef\xbb\xbf{"input": "Q", "output": "A"}', "not JSON: "),  # a mark that starts no file
    ],
)  # fmt: skip
def test_a_bad_row_is_named(row: bytes, says: str, tmp_path: Path) -> None:
    line = problems(tmp_path, GOOD + b"\n\n" + row)[0]
    assert line.startswith(f"train.jsonl:3: {says}"), line
    assert line.isprintable()


def test_twenty_problems_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    lines = problems(tmp_path, b"{}\n" * 20)
    assert len(lines) == 20 and lines[19].startswith("train.jsonl:20:")
    lines = problems(tmp_path, b"{}\n" * 21)
    assert len(lines) == 21 and lines[20] == "and 1 more"
    with pytest.raises(BadRows) as caught:
        load(tmp_path, b"{}\n" * 500 + GOOD)
    assert caught.value.count == 500 and caught.value.exit_code == 2


def test_problems_of_all_files_come_together(tmp_path: Path) -> None:
    paths = [write(tmp_path, b"{}\n" + GOOD, "a.jsonl"), write(tmp_path, GOOD, "b"), write(tmp_path, b"\n3", "c")]
    with pytest.raises(BadRows, match=r"a\.jsonl:1: .*\n.*c:2: ") as caught:
        IOSampler(paths, template="plain", context=64)
    assert caught.value.count == 2


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_a_newline_byte_ends_a_line(char: str, tmp_path: Path) -> None:
    inside = char if ord(char) > 31 else json.dumps(char)[1:-1]
    corpus = load(tmp_path, f'{{"input": "a{inside}b", "output": "A"}}\n'.encode() + GOOD)
    assert texts(corpus) == [f"a{char}b\nA</s>", "Q\nA</s>"]
    assert [corpus.where(row).line for row in (0, 1)] == [1, 2]


def test_the_test_of_newlines_sees_str_splitlines() -> None:
    """Negative control: what a reader that splits text, not bytes, makes of the row."""
    row = '{"input": "a\u2028b", "output": "A"}'
    with pytest.raises(RowError, match="not JSON"):
        parse(row.splitlines()[0].encode())


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \t\r\n", b"\n\n\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_marks_and_an_open_last_line(end: bytes, last: bool, mark: bytes, tmp_path: Path) -> None:
    corpus = load(tmp_path, mark + end.join([GOOD, GOOD, GOOD]) + (end if last else b""))
    assert texts(corpus) == ["Q\nA</s>"] * 3
    per = end.count(b"\n")
    assert [corpus.where(i).line for i in range(3)] == [1, 1 + per, 1 + 2 * per]
    assert [corpus.where(i).offset for i in range(3)] == [len(mark) + i * len(GOOD + end) for i in range(3)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_utf16_is_named(encoding: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.jsonl: the file is UTF-16 or UTF-32, not UTF-8; convert it"):
        load(tmp_path, GOOD.decode().encode(encoding))


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf", b"\n \n", b"\xef\xbb\xbf\r\n\n"])
def test_no_row_is_an_error(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no row in it"):
        load(tmp_path, data)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the file is empty"):
        load(tmp_path, b"")
    with pytest.raises(UsageError, match="no such file"):
        IOSampler([str(tmp_path / "none")], template="plain", context=8)
    with pytest.raises(UsageError, match="--data: name a file"):
        IOSampler([], template="plain", context=8)


def test_the_locale_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process with LANG=C and without UTF-8 mode, as `open` would decode by the locale."""
    import subprocess

    path = write(tmp_path, '{"input": "é", "output": "日本"}'.encode())
    code = (
        "import sys; from mlxdet.data.records import IOSampler; c = IOSampler([sys.argv[1]], template='plain', context=64)"
        "; print(c.sample(0)[0].ids.tolist())"
    )
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, check=True).stdout
    assert json.loads(out) == list("é\n日本</s>".encode())


def many(folder: Path, rows: int) -> str:
    lines = [json.dumps({"input": f"{i} é", "output": "x" * (i % 7 + 1)}, ensure_ascii=i % 2 == 0) for i in range(rows)]
    return write(folder, ("\n\n".join(lines) + "\n").encode())


def test_a_large_file_is_read_on_demand_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = many(tmp_path, 300)
    held = IOSampler([path], template="plain", context=64)
    monkeypatch.setattr(jsonl, "IN_MEMORY", 100)
    streamed = IOSampler([path], template="plain", context=64)
    assert streamed._files[0]._held is None and held._files[0]._held is not None
    assert streamed.describe() == held.describe()
    order = list(range(300)) * 2
    random.Random(1).shuffle(order)
    for i in order:
        assert streamed.sample(i)[0].ids.tolist() == held.sample(i)[0].ids.tolist()
        assert streamed.where(i) == held.where(i)


def test_memory_holds_the_index_and_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    path = write(tmp_path, b"".join(b'{"input": "%d", "output": "%s"}\n' % (i, b"y" * 20_000) for i in range(400)))
    monkeypatch.setattr(jsonl, "IN_MEMORY", 100)
    tracemalloc.start()
    lines = JsonLines(Source(path, os.path.getsize(path)))
    assert sum(1 for _ in lines.scan()) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert os.path.getsize(path) > 8_000_000 and peak < 500_000


@pytest.mark.parametrize("change", ["append", "touch", "shorten"])
def test_a_file_that_changes_after_it_was_read_is_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path, 50)
    held = IOSampler([path], template="plain", context=64)
    monkeypatch.setattr(jsonl, "IN_MEMORY", 100)
    streamed = IOSampler([path], template="plain", context=64)
    want = streamed.sample(49)[0].ids.tolist()
    if change == "touch":  # other bytes, the same size
        raw = Path(path).read_bytes()
        Path(path).write_bytes(raw.replace(b"x", b"y"))
        os.utime(path, ns=(1, 1))
    elif change == "append":
        with open(path, "ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, 100)
    with pytest.raises(UsageError, match=r"train\.jsonl: the file changed after it was read"):
        streamed.sample(49)
    assert held.sample(49)[0].ids.tolist() == want, "a file in memory is not disturbed"


def test_a_replaced_file_is_not_the_one_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor that writes beside and renames leaves the old bytes to those who have them open."""
    monkeypatch.setattr(jsonl, "IN_MEMORY", 100)
    path = many(tmp_path, 50)
    streamed = IOSampler([path], template="plain", context=64)
    want = streamed.sample(7)[0].ids.tolist()
    os.replace(write(tmp_path, GOOD, "new"), path)
    assert streamed.sample(7)[0].ids.tolist() == want


def test_the_digest_is_of_content_and_settings(tmp_path: Path) -> None:
    def digest(data: bytes = GOOD, name: str = "a", **settings: object) -> str:
        values = {"template": "plain", "context": 64} | settings
        return IOSampler([write(tmp_path, data, name)], **values).digest  # type: ignore[arg-type]

    first = digest()
    assert digest(name="elsewhere") == first and len(first) == 32
    others = [digest(GOOD + b"\n"), digest(context=63), digest(template="chatml"), digest(truncate=True)]
    assert len({first, *others}) == 5
    path = tmp_path / "two"
    path.mkdir()
    write(path, GOOD, "1")
    write(path, GOOD, "2")
    both = IOSampler([str(path)], template="plain", context=64)
    assert both.rows == 2 and both.digest != digest(GOOD + b"\n" + GOOD)
    assert both.where(1).file.endswith("2")


# Parquet


def table(folder: Path, columns: dict[str, object], rows: int = 2) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(folder / "train.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    n = 3000
    columns = {"input": [f"{i} é" for i in range(n)], "output": [f"A{i % 3}" for i in range(n)], "id": list(range(n))}
    rows = [{"input": a, "output": b, "id": c} for a, b, c in zip(*columns.values(), strict=True)]
    lines = IOSampler([write(tmp_path, "\n".join(map(json.dumps, rows)).encode())], template="plain", context=64)
    tabled = IOSampler([table(tmp_path, columns, 700)], template="plain", context=64)
    assert texts(tabled)[:5] == texts(lines)[:5] and len(tabled) == n
    for i in (0, 1, 699, 700, 1023, 1024, 2999):
        assert tabled.sample(i)[0].ids.tolist() == lines.sample(i)[0].ids.tolist()
    assert tabled.describe()["ignored_fields"] == lines.describe()["ignored_fields"] == {"id": n}
    assert tabled.where(699).line == 700 and tabled.where(0).line == 1


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, {"input": ["Q", "R", None], "output": ["A", None, "A"]})
    with pytest.raises(BadRows, match=r"parquet:row 2: field 'output' is missing .*\n.*parquet:row 3: field 'input'"):
        IOSampler([path], template="plain", context=64)


def test_parquet_messages_with_null_columns(tmp_path: Path) -> None:
    from mlxdet.data.records import SFTCorpus

    rows = [
        [
            {"role": "user", "content": "Q", "tool_calls": None},
            {"role": "assistant", "content": "A", "tool_calls": None},
        ]
    ]
    corpus = SFTCorpus([table(tmp_path, {"messages": rows, "tools": [None]})], template="plain", context=64)
    assert texts(corpus) == ["Q\nA</s>"]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"input": [b"Q"], "output": ["A"]}, "row 1: holds a value of type bytes"),
        ({"input": [1.5], "output": ["A"]}, "row 1: field 'input' must be a string, not a number"),
        ({"input": ["Q"]}, "row 1: field 'output' is missing"),
    ],
)
def test_odd_columns_are_named(columns: dict[str, object], says: str, tmp_path: Path) -> None:
    path = table(tmp_path, columns)
    with pytest.raises(UsageError, match=re.escape(f"train.parquet:{says}")):
        IOSampler([path], template="plain", context=64)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    whole = Path(table(tmp_path, {"input": ["Q" * 50] * 90, "output": ["A"] * 90})).read_bytes()
    rng = random.Random(4)
    refused = 0
    for trial in range(60):
        raw = bytearray(whole)
        if trial < 20:
            raw = raw[: rng.randrange(4, len(raw))]
        else:
            raw[rng.randrange(4, len(raw))] ^= 1 << rng.randrange(8)
        path = write(tmp_path, bytes(raw), "damaged.parquet")
        try:
            IOSampler([path], template="plain", context=64)
        except UsageError as error:
            refused += 1
            assert str(error).startswith(f"{path}:"), error
    assert refused >= 20


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path, {"input": ["Q"], "output": ["A"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r'reading it needs pyarrow: pip install "mlxdet\[parquet\]"'):
        IOSampler([path], template="plain", context=64)
    assert parquet.is_parquet(Source(path, 1))


# Fuzz: no traceback but MlxdetError, and rows kept + dropped + bad = lines that are not blank

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["input", "output", "tools", "x"]) | st.text(max_size=3)
rows = (
    st.dictionaries(names, st.text(max_size=30) | values, max_size=4).map(lambda row: json.dumps(row, ensure_ascii=len(row) % 2 == 0))
    | st.builds(lambda a, b: json.dumps({"input": a, "output": b}), st.text(max_size=60), st.text(max_size=60))
    | values.map(json.dumps)
).map(lambda text: text.encode("utf-8", "surrogatepass"))  # fmt: skip
good_rows = st.builds(lambda a, b: json.dumps({"input": a, "output": b}).encode(), st.text("ab<>/s", max_size=60), st.text("xy", max_size=30))  # fmt: skip
lines_of = st.lists(rows | st.binary(max_size=20) | st.sampled_from([b"", b" ", b"\r", b"\xef\xbb\xbf"]), max_size=8)


def check_accounting(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    body = data.removeprefix(b"\xef\xbb\xbf")
    total = sum(1 for line in body.split(b"\n") if line.strip(b" \t\r"))
    try:
        corpus = IOSampler([str(path)], template="plain", context=40)
    except BadRows as error:
        assert 1 <= error.count <= total and len(error.problems) == min(20, error.count)
        good = [line for line in body.split(b"\n") if line.strip(b" \t\r") and usable(line)]
        assert error.count == total - len(good)
        return
    except MlxdetError as error:
        assert str(error).startswith(str(path))
        return
    assert corpus.rows == total == len(corpus) + len(list(corpus.dropped()))
    assert total == len(corpus) + sum(corpus.describe()["dropped"].values())
    for i in range(len(corpus)):
        (part,) = corpus.sample(i)
        assert 0 < len(part.ids) <= 41 and part.scored.any() and not part.scored[0]


def usable(line: bytes) -> bool:
    """Whether Python's own reader finds an object with two texts and no tools in it, each name once."""
    try:
        pairs = json.loads(
            line.decode(),
            object_pairs_hook=lambda p: p if len(dict(p)) == len(p) else 1 / 0,
            parse_constant=lambda _: 1 / 0,
        )
        row = dict(pairs) if isinstance(pairs, list) and all(isinstance(p, tuple) for p in pairs) and pairs else {}
        return all(isinstance(row[k], str) and bool(row[k].encode()) | True for k in ("input", "output")) and row.get(
            "tools"
        ) in (None, "", [])
    except (ValueError, KeyError, ZeroDivisionError, RecursionError):
        return False


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=lines_of, ends=st.sampled_from([b"\n", b"\r\n"]), mark=st.booleans())
def test_fuzzed_lines_are_all_accounted_for(tmp_path: Path, lines: list[bytes], ends: bytes, mark: bool) -> None:
    check_accounting(tmp_path / "fuzz.jsonl", (b"\xef\xbb\xbf" if mark else b"") + ends.join(lines))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(good_rows, max_size=8))
def test_fuzzed_sound_rows_are_all_accounted_for(tmp_path: Path, lines: list[bytes]) -> None:
    check_accounting(tmp_path / "fuzz.jsonl", b"\n".join(lines))


part = st.sampled_from(["Q", "A", "", "</s>", "x" * 60]) | st.text(max_size=6)
message = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name"]), values, max_size=4
) | st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": part | values})
turns = part | st.lists(message, max_size=4) | values
records = st.dictionaries(
    st.sampled_from(
        ["messages", "prompt", "completion", "instruction", "input", "response", "chosen", "rejected", "tools"]
    ),
    turns,
    max_size=5,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["sft", "preference"]), rows=st.lists(records, min_size=1, max_size=5), truncate=st.booleans()
)
def test_fuzzed_conversations_are_all_accounted_for(
    tmp_path: Path, kind: str, rows: list[object], truncate: bool
) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    try:
        corpus = KINDS[kind]([str(path)], template="chatml", context=90, truncate=truncate)
    except MlxdetError as error:
        assert all(line.isprintable() for line in str(error).split("\n")) and str(error).startswith(f"{path}:")
        return
    assert corpus.rows == len(rows) == len(corpus) + len(list(corpus.dropped()))
    for i in range(len(corpus)):
        for side in corpus.sample(i):
            assert 0 < len(side.ids) <= 91 and side.scored.any() and not side.scored[0]


def test_the_accounting_sees_a_row_that_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reader that passes over a row without a word."""
    scan = JsonLines.scan

    def skipping(self: JsonLines):  # type: ignore[no-untyped-def]
        for n, raw in enumerate(scan(self)):
            if n != 1:
                yield raw

    check_accounting(tmp_path / "a", b"\n".join([GOOD] * 3))
    monkeypatch.setattr(JsonLines, "scan", skipping)
    with pytest.raises(AssertionError):
        check_accounting(tmp_path / "a", b"\n".join([GOOD] * 3))
