"""Byte corpora and what is common to both kinds: which files, in which order, and where a token lies."""

import hashlib
import os
import platform
from pathlib import Path

import numpy as np
import pytest

from mlxdet.data import ByteCorpus, open_corpus, text
from mlxdet.data.demo import demo_text
from mlxdet.data.sources import find_sources
from mlxdet.errors import UsageError

HARD = b"\xef\xbb\xbfBOM\r\n\x92cp1252\x92\n\x00NUL \xff\xfe\n" + bytes(range(256)) + b"end"


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def test_bytes_are_untouched(tmp_path: Path) -> None:
    corpus = open_corpus([write(tmp_path / "a", HARD)], None, None)
    assert isinstance(corpus, ByteCorpus) and corpus.vocab_size == 256
    assert corpus.tokens.dtype == np.uint8 and corpus.tokens.tobytes() == HARD
    assert corpus.slice(3, 6).dtype == np.int32 and bytes(corpus.slice(3, 6).astype(np.uint8)) == b"BOM"
    assert not corpus.tokens.flags.writeable


@pytest.mark.parametrize("limit", [1 << 26, 0])
def test_held_mapped_and_joined_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, own_cache: Path
) -> None:
    monkeypatch.setattr(text, "IN_MEMORY", limit)
    monkeypatch.setattr(text, "SCAN", 64)
    one = open_corpus([write(tmp_path / "whole", HARD * 3)], None, None)
    assert not own_cache.exists(), "one file needs no cache"
    cut = [write(tmp_path / "p" / str(i), HARD * (i < 3)) for i in range(4)]
    several = open_corpus([str(tmp_path / "p")], None, None)
    assert own_cache.exists() == (limit == 0)
    assert one.tokens.tobytes() == several.tokens.tobytes() == HARD * 3
    assert one.digest == several.digest, "the digest is of the content, however it is cut into files"
    for index in range(0, len(one), 5):
        part, offset = divmod(index, len(HARD))
        assert (several.where(index).file, several.where(index).offset) == (cut[part], offset)
        assert several.where(index).line == HARD[:offset].count(b"\n") + 1
        assert one.where(index).line == (HARD * 3)[:index].count(b"\n") + 1
    assert open_corpus(cut[:3], None, None).digest == one.digest


def test_mapped_file_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "IN_MEMORY", 0)
    tokens = open_corpus([write(tmp_path / "a", HARD)], None, None).tokens
    assert type(tokens) is np.ndarray and isinstance(tokens.base, np.memmap)


def test_digest_depends_on_content_alone(tmp_path: Path) -> None:
    a = open_corpus([write(tmp_path / "a", b"some text")], None, tmp_path / "c1").digest
    assert a == open_corpus([write(tmp_path / "x" / "b", b"some text")], None, tmp_path / "c2").digest
    assert len(a) == 32 and a != open_corpus([write(tmp_path / "c", b"some texT")], None, None).digest
    assert a == hashlib.blake2b(b"mlxdet bytes 1\x00some text", digest_size=16).hexdigest()


def test_directory_is_sorted_by_the_bytes_of_its_names(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.txt", "a-1.txt", "B.txt", "é.txt", "z.txt", "a/b/c.txt"]
    for name in reversed(names):
        write(tmp_path / "d" / name, name.encode())
    for hidden in (".hidden", ".git/config", "a/.secret"):
        write(tmp_path / "d" / hidden, b"never")
    write(tmp_path / "d" / "empty.txt", b"")
    os.symlink(tmp_path / "d" / "a", tmp_path / "d" / "loop")
    order = [os.path.relpath(source.name, tmp_path / "d") for source in find_sources([str(tmp_path / "d")])]
    assert order == ["B.txt", "a-1.txt", "a/b/c.txt", "a/z.txt", "b.txt", "empty.txt", "z.txt", "é.txt"]
    given = find_sources([str(tmp_path / "d" / "z.txt"), str(tmp_path / "d" / "b.txt")])
    assert [os.path.basename(source.name) for source in given] == ["z.txt", "b.txt"]


def test_listing_order_of_the_file_system_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "fbdace":
        write(tmp_path / "d" / name, name.encode())
    real = os.walk
    shuffled = lambda top, **kw: ((f, d[::-1], sorted(n, key=hash)) for f, d, n in real(top, **kw))  # noqa: E731
    monkeypatch.setattr(os, "walk", shuffled)
    assert open_corpus([str(tmp_path / "d")], None, None).tokens.tobytes() == b"abcdef"


def test_unreadable_input_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    write(tmp_path / "blank" / "a", b"")
    write(tmp_path / "hides" / ".a", b"text")
    os.symlink(tmp_path / "nowhere", tmp_path / "broken")
    os.mkfifo(tmp_path / "fifo")
    cases = {
        write(tmp_path / "empty", b""): "empty",
        str(tmp_path / "none"): "no text",
        str(tmp_path / "blank"): "no text",
        str(tmp_path / "hides"): "no text",
        str(tmp_path / "missing"): "no such file",
        str(tmp_path / "broken"): "no such file",
        str(tmp_path / "fifo"): "not a regular file",
        str(tmp_path / "empty" / "below"): "cannot be read: Not a directory",
    }
    for path, message in cases.items():
        with pytest.raises(UsageError, match=message) as caught:
            open_corpus([path], None, None)
        assert path in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        open_corpus(["a\x00b"], None, None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "closed", b"text")
    os.chmod(path, 0)
    with pytest.raises(UsageError, match="closed: cannot be read: Permission denied"):
        open_corpus([path], None, None)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_sources([write(tmp_path / "a", b"text")])[0]
    write(tmp_path / "a", b"longer text")
    with pytest.raises(UsageError, match="changed"):
        list(source.chunks())


def test_where_and_slice_know_their_bounds(tmp_path: Path) -> None:
    corpus = open_corpus([write(tmp_path / "a", b"ab\nc")], None, None)
    assert [(corpus.where(i).offset, corpus.where(i).line) for i in range(4)] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    for index in (-1, 4):
        with pytest.raises(IndexError):
            corpus.where(index)
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(IndexError):
            corpus.slice(start, stop)
    with pytest.raises(ValueError, match="256"):
        corpus.decode(np.array([256]))


def test_decode_shows_broken_characters_without_failing(tmp_path: Path) -> None:
    corpus = open_corpus([write(tmp_path / "a", "é".encode())], None, None)
    assert corpus.decode(corpus.tokens) == "é" and corpus.decode(corpus.tokens[:1]) == "\ufffd"


def test_describe(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"text")
    corpus = open_corpus([path], None, None)
    assert corpus.describe() == {
        "kind": "bytes",
        "tokens": 4,
        "vocab": 256,
        "digest": corpus.digest,
        "files": [{"name": path, "bytes": 4, "sha256": hashlib.sha256(b"text").hexdigest()}],
    }


def test_embedded_text_is_the_interpreters_own_and_says_so(tmp_path: Path, own_cache: Path) -> None:
    corpus = open_corpus([], None, None)
    assert len(corpus) > 300_000 and corpus.tokens.tobytes() == demo_text()
    assert "assert" in corpus.decode(corpus.tokens[:5000])
    described = corpus.describe()
    assert (described["embedded"], described["python"]) == ("pydoc_data.topics", platform.python_version())
    assert corpus.digest == open_corpus([write(tmp_path / "copy", demo_text())], None, None).digest
    assert "embedded" not in open_corpus([str(tmp_path / "copy")], None, None).describe()
    assert corpus.where(len(corpus) - 1).line == demo_text().count(b"\n", 0, -1) + 1
    assert not own_cache.exists()
