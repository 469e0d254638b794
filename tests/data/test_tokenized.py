"""Ids are a function of text and tokenizer, whatever the block size, the cache, the locale or the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxdet.data import TokenizedCorpus, cache, open_corpus, sources, text
from mlxdet.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from mlxdet.errors import UsageError


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def opened(
    path: str | Path, model: str | Path, cache_dir: Path | None = None, unk_limit: float = 0.01
) -> TokenizedCorpus:
    corpus = open_corpus([str(path)], str(model), cache_dir, unk_limit)
    assert isinstance(corpus, TokenizedCorpus)
    return corpus


def test_ids_are_those_of_the_lines(book: Path, model: Path) -> None:
    corpus, tokenizer = opened(book, model), load_tokenizer(str(model))
    lines = book.read_bytes().decode().split("\n")
    want = [i for line in lines[:-1] for i in tokenizer.encode(line + "\n")]
    assert corpus.tokens.tolist() == want == tokenizer.encode(book.read_bytes().decode()).tolist()
    assert corpus.tokens.dtype == np.uint16 and corpus.vocab_size == 400
    assert corpus.decode(corpus.tokens).encode() == book.read_bytes()


@pytest.mark.parametrize("block", [1, 100, 10_000])
def test_ids_do_not_depend_on_the_block_size(
    book: Path, model: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = opened(book, model, tmp_path / "a")
    monkeypatch.setattr(text, "BLOCK", block)
    got = opened(book, model, tmp_path / "b")
    assert np.array_equal(got.tokens, want.tokens) and got.digest == want.digest
    assert [got.where(i) for i in range(0, len(got), 2003)] == [want.where(i) for i in range(0, len(got), 2003)]


def test_long_lines_are_cut_at_characters(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNIT", 16)
    for shift in range(4):
        data = ("a" * shift + "日本語😀éx" * 20 + "\nshort\n" + "b" * 16 + "\n" + "c" * 15 + "\n" + "é" * 8).encode()
        source = sources.find_sources([write(tmp_path / f"t{shift}", data)])[0]
        pieces = list(sources.units(source))
        assert b"".join(unit.raw for unit in pieces) == data
        assert all(0 < len(unit.raw) <= 16 for unit in pieces)
        for unit in pieces:
            assert data[unit.offset :].startswith(unit.raw) and unit.line == data[: unit.offset].count(b"\n") + 1
        corpus = opened(source.name, model)
        assert corpus.decode(corpus.tokens).encode() == data


def test_where_names_file_offset_and_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK", 50)
    texts = [b"one\ntwo two\n", b"\xef\xbb\xbfabc \xe2\x96\x81 \xe6\x97\xa5\nlast", b"\xef\xbb\xbf", b"x\n" * 100]
    for i, data in enumerate(texts):
        write(tmp_path / "d" / str(i), data)
    corpus = opened(tmp_path / "d", model)
    seen = {str(i): b"" for i in range(4)}
    for index in range(len(corpus)):
        place = corpus.where(index)
        name = os.path.basename(place.file)
        data = texts[int(name)]
        assert place.line == data[: place.offset].count(b"\n") + 1
        assert place.offset == len(seen[name]) + 3 * data.startswith(b"\xef\xbb\xbf")
        length = corpus.tokenizer.byte_length(int(corpus.tokens[index]))
        seen[name] += data[place.offset : place.offset + length]
    assert [seen[str(i)] for i in range(4)] == [data.removeprefix(b"\xef\xbb\xbf") for data in texts]
    assert corpus.describe()["byte_order_marks_dropped"] == 2
    assert corpus.decode(corpus.tokens) == b"".join(data.removeprefix(b"\xef\xbb\xbf") for data in texts).decode()


def test_where_refuses_a_text_that_changed(model: Path, tmp_path: Path) -> None:
    corpus = opened(write(tmp_path / "t", b"first line\nsecond line\n"), model)
    write(tmp_path / "t", b"first line\nsecund line\n")
    assert corpus.where(0).line == 1
    with pytest.raises(UsageError, match="t: the text is no longer the one"):
        corpus.where(len(corpus) - 1)
    os.remove(tmp_path / "t")
    with pytest.raises(UsageError, match="t: cannot be read: No such file"):
        corpus.where(0)


def test_what_is_not_utf8_is_refused_with_its_place(model: Path, tmp_path: Path) -> None:
    cases = {
        b"fine\nit\x92s not\n": r"line 2, byte offset 7: not UTF-8 \(0x92",
        b"\xef\xbb\xbfa\n\xff\n": r"line 2, byte offset 5: not UTF-8 \(0xff",
        b"ends early \xe6\x97": r"line 1, byte offset 11: not UTF-8 \(0xe6: unexpected end",
        b"x" * 70_000 + b"\x80": r"line 1, byte offset 70000: not UTF-8 \(0x80",
        b"x" * 65_535 + b"\xe6\x97" + b"y" * 10: r"line 1, byte offset 65535: not UTF-8 \(0xe6",
        b"\xed\xa0\x80": "not UTF-8",
        b"\xc0\x80": "not UTF-8",
    }
    for data, message in cases.items():
        path = write(tmp_path / "t", data)
        with pytest.raises(UsageError, match=message) as caught:
            opened(path, model, tmp_path / "cache")
        assert str(caught.value).startswith(path + ": ") and "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir()), "nothing half-made is left"


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_named(model: Path, tmp_path: Path, codec: str) -> None:
    with pytest.raises(UsageError, match="UTF-16"):
        opened(write(tmp_path / "t", "plain English text".encode(codec)), model)


def test_nuls_alone_are_not_taken_for_utf16(model: Path, tmp_path: Path) -> None:
    data = b"a\x00b\x00\x00c" * 40
    corpus = opened(write(tmp_path / "t", data), model)
    assert corpus.decode(corpus.tokens).encode() == data


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf", b"   \n \n"])
def test_a_text_without_tokens_is_refused(lossy: Path, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UsageError, match="t: the tokenizer finds no token"):
        opened(write(tmp_path / "t", data), lossy)


def test_unknown_tokens_are_counted_and_refused_above_the_limit(lossy: Path, tmp_path: Path) -> None:
    few = opened(write(tmp_path / "few", b"the clocks were striking and bright\n" * 20 + "ж\n".encode()), lossy)
    described = few.describe()
    assert described["unknown"] == 1 and described["unknown_share"] == 1 / len(few)
    assert described["tokenizer"]["round_trip"] is False
    many = write(tmp_path / "many", "the жжж clocks ж\n".encode())
    with pytest.raises(UsageError, match=r"2 of \d+ tokens \(\d+\.\d\d%\) are unknown .* more than 1.00%.*--unk-limit"):
        opened(many, lossy)
    assert opened(many, lossy, unk_limit=0.9).describe()["unknown"] == 2
    place = few.where(len(few) - 1)
    assert (place.line, place.offset) == (21, 720), "the line, where the tokenizer does not keep the text"


def test_cache_is_used_and_belongs_to_one_text_and_tokenizer(
    book: Path, model: Path, lossy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(book, model, tmp_path / "c")
    assert isinstance(first.tokens.base, np.memmap)
    calls: list[int] = []
    real = SentencePieceTokenizer.encode_units
    monkeypatch.setattr(SentencePieceTokenizer, "encode_units", lambda self, t: calls.append(len(t)) or real(self, t))
    copy = write(tmp_path / "elsewhere" / "copy.txt", book.read_bytes())
    again = opened(copy, model, tmp_path / "c")
    assert not calls and again.digest == first.digest and np.array_equal(again.tokens, first.tokens)
    assert opened(book, lossy, tmp_path / "c", 1.0).digest != first.digest and calls
    assert opened(write(tmp_path / "t", book.read_bytes() + b"x"), model, tmp_path / "c").digest != first.digest
    assert len(list((tmp_path / "c").iterdir())) == 3


def test_text_changing_under_the_encoder_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t", b"some text\n")
    real = cache.fetch

    def late(*args: object) -> object:
        write(tmp_path / "t", b"other text\n")
        return real(*args)

    monkeypatch.setattr(cache, "fetch", late)
    with pytest.raises(UsageError, match="t: the file changed"):
        opened(path, model, tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())


def test_locale_and_hash_seed_change_nothing(book: Path, model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from mlxdet.data import open_corpus; from pathlib import Path\n"
        "c = open_corpus([sys.argv[1]], sys.argv[2], Path(sys.argv[3]))\n"
        "print(c.digest, c.where(9999).offset, 'mlx' in sys.modules, 'mlx.core' in sys.modules)"
    )
    want = opened(book, model, tmp_path / "0")
    for i, extra in enumerate(({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "POSIX", "LANG": "de_DE.ISO-8859-1"}), 1):
        env = {**os.environ, "PYTHONHASHSEED": str(i), "PYTHONCOERCECLOCALE": "0", **extra}
        command = [sys.executable, "-c", code, str(book), str(model), str(tmp_path / str(i))]
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
        assert out == [want.digest, str(want.where(9999).offset), "False", "False"]
    files = [next((tmp_path / str(i)).iterdir()).read_bytes() for i in range(3)]
    assert files[0] == files[1] == files[2]
