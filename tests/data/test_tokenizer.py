"""Tokenizers made here keep every text and are made repeatably; those from elsewhere are reported honestly."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdet.data import load_tokenizer, tokenizer, train_tokenizer
from mlxdet.errors import UsageError

TEXTS = [
    *(
        "",
        " ",
        "  two",
        "three   ",
        "a\nb",
        "\n\n",
        "x\r\ny\r",
        "tab\tand\t\ttab",
        "nul\x00nul",
        "\ufffd",
        "\U0001f600 \U0001f468\u200d\U0001f469",
    ),
    *(
        "ａｂｃ",
        "e\u0301 é",
        "\u2581",
        " \u2581\u2581 x\u2581",
        "\u2585",
        "\u2047",
        " \u2047 ",
        "<unk>",
        "<s></s>",
        "<0x41>",
        "\ufeffBOM",
        "\u2028\x85\x0b\x0c",
    ),
    *("\ud7ff\ue000\U0010ffff", "日本語のテキスト", "\u00a0nbsp", "\x7f\x80\x1b[0m"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_of_awkward_text(model: Path, text: str) -> None:
    made = load_tokenizer(str(model))
    assert made.round_trip and made.decode(made.encode(text)) == text
    plain = load_tokenizer(None)
    assert plain.decode(plain.encode(text)) == text


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=60))
def test_round_trip_of_any_text(model: Path, text: str) -> None:
    made = _loaded(str(model))
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert sum(made.byte_length(int(i)) for i in ids) == len(text.encode())


_cache: dict[str, object] = {}


def _loaded(path: str) -> tokenizer.SentencePieceTokenizer:
    if path not in _cache:
        _cache[path] = load_tokenizer(path)
    return _cache[path]


def test_every_character_up_to_ffff_is_kept(model: Path) -> None:
    made = load_tokenizer(str(model))
    for start in range(0, 0xD800, 0x800):
        text = "".join(map(chr, range(start, start + 0x800)))
        assert made.decode(made.encode(text)) == text


def test_text_without_spaces_still_gives_a_tokenizer_that_has_one(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("日本語の文章です、漢字がたくさん\n".encode() * 3)
    made = load_tokenizer(str(train_tokenizer([str(tmp_path / "t")], 290, tmp_path / "m")))
    assert made.round_trip and made.decode(made.encode("  日 本")) == "  日 本"


def test_training_is_repeatable_in_fresh_processes(book: Path, model: Path, tmp_path: Path) -> None:
    code = "import sys; from mlxdet.data import train_tokenizer; train_tokenizer([sys.argv[1]], 400, sys.argv[2])"
    other = tmp_path / "another name" / "text"
    other.parent.mkdir()
    other.write_bytes(book.read_bytes())
    for i in (1, 2):
        env = {**os.environ, "PYTHONHASHSEED": str(i), "LC_ALL": "C"}
        done = subprocess.run(
            [sys.executable, "-c", code, other, tmp_path / str(i)], env=env, capture_output=True, check=True
        )
        assert done.stdout == done.stderr == b"", "sentencepiece's log is silent"
        assert (tmp_path / str(i)).read_bytes() == model.read_bytes()
    raw = model.read_bytes()
    assert b"book" not in raw and str(book.parent).encode() not in raw


def test_one_more_character_gives_another_model(book: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(book.read_bytes().replace(b"clocks", b"chimes"))
    other = train_tokenizer([str(tmp_path / "t")], 400, tmp_path / "m")
    assert load_tokenizer(str(other)).digest != load_tokenizer(str(model)).digest


def test_vocabulary_that_does_not_suit_the_text_names_the_bound(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    path.write_text("the cat sat on the mat\n")
    with pytest.raises(UsageError, match=r"^--vocab: 8000 is too large for this text; give 290 or less$"):
        train_tokenizer([str(path)], 8000, tmp_path / "m")
    with pytest.raises(UsageError, match=r"^--vocab: 262 is too small: the characters of the text need 269$"):
        train_tokenizer([str(path)], 262, tmp_path / "m")
    assert load_tokenizer(str(train_tokenizer([str(path)], 290, tmp_path / "max"))).vocab_size == 290
    assert load_tokenizer(str(train_tokenizer([str(path)], 269, tmp_path / "min"))).vocab_size == 269
    with pytest.raises(UsageError, match="give 290 or less"):
        train_tokenizer([str(path)], 291, tmp_path / "m")
    for vocab in (-1, 0, 1, 259, 1 << 30):
        with pytest.raises(UsageError, match="from 260 to"):
            train_tokenizer([str(path)], vocab, tmp_path / "m")
    assert sorted(os.listdir(tmp_path)) == ["max", "min", "t"] and capfd.readouterr() == ("", "")


def test_awkward_training_text(tmp_path: Path) -> None:
    """Words longer than sentencepiece can hold, NULs and its own marks; each alone would stop or empty the training."""
    (tmp_path / "t").write_bytes(b"a" * 200_000 + b"\n" + "\x00b\u2581c\u2585d\te\n".encode() * 50 + b"\n\n\r\n  \n")
    made = load_tokenizer(str(train_tokenizer([str(tmp_path / "t")], 268, tmp_path / "m")))
    assert made.round_trip and made.vocab_size == 268
    (tmp_path / "t").write_bytes(b"\n\t\n \x00")
    with pytest.raises(UsageError, match="too short"):
        train_tokenizer([str(tmp_path / "t")], 275, tmp_path / "n")
    (tmp_path / "t").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="byte offset 3"):
        train_tokenizer([str(tmp_path / "t")], 275, tmp_path / "n")


def test_a_long_text_is_thinned_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "TRAIN_BYTES", 100)
    (tmp_path / "t").write_text("".join(f"line{i}\n" for i in range(50)))
    source = tokenizer.find_sources([str(tmp_path / "t")])
    assert tokenizer._sentences(source) == [f"line{i}" for i in range(0, 50, 4)]


def test_output_is_never_overwritten(book: Path, tmp_path: Path) -> None:
    (tmp_path / "m").write_text("precious")
    with pytest.raises(UsageError, match="m: exists already"):
        train_tokenizer([str(book)], 400, tmp_path / "m")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        train_tokenizer([str(book)], 400, tmp_path / "no" / "m")
    with pytest.raises(UsageError, match="no such file"):
        train_tokenizer([str(tmp_path / "nothing")], 400, tmp_path / "n")
    assert os.listdir(tmp_path) == ["m"] and (tmp_path / "m").read_text() == "precious"


def test_what_is_no_model_is_refused_by_name(
    book: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = {str(tmp_path): "is a directory", str(tmp_path / "missing"): "cannot be read: No such file"}
    for name, raw in {"empty": b"", "text": book.read_bytes(), "json": b"{}", "cut": model.read_bytes()[:5000]}.items():
        (tmp_path / name).write_bytes(raw)
        cases[str(tmp_path / name)] = "not a sentencepiece model"
    for path, message in cases.items():
        with pytest.raises(UsageError, match=message) as caught:
            load_tokenizer(path)
        assert str(caught.value).startswith(path + ": ") and ".cc" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_ids_and_text_that_do_not_fit_are_refused(model: Path) -> None:
    made, plain = load_tokenizer(str(model)), load_tokenizer(None)
    for some in (made, plain):
        for wrong in (-1, some.vocab_size, 2**40):
            with pytest.raises(ValueError, match=f"vocabulary of {some.vocab_size}"):
                some.decode([0, wrong])
        with pytest.raises(UsageError, match="character 2 is half of a surrogate pair"):
            some.encode("a\ud800")
    assert plain.encode(os.fsdecode(b"\x92")).tolist() == [0x92], "a prompt that is not UTF-8"
    assert made.encode("abc").dtype == plain.encode("abc").dtype == np.int32
    assert made.encode("").shape == plain.encode("").shape == (0,)


def test_a_tokenizer_that_loses_text_says_so(lossy: Path) -> None:
    other = load_tokenizer(str(lossy))
    assert not other.round_trip and other.decode(other.encode("a\n  b")) != "a\n  b"
