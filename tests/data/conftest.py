"""Small texts and tokenizers for the tests of mlxdet.data."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxdet.data import cache, open_corpus, train_tokenizer
from mlxdet.data.text import ByteCorpus, TokenizedCorpus

LINES = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "  Indented, with two spaces; and a tab\there.",
    "",
    "Grüße aus Köln: naïve café, Ελλάδα, 日本語, 😀 and ａｂｃ.",
    "def f(x):",
    "        return x ** 2  # squares",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "mlxdet"


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 100 kB, 4 kinds of line ends and indentation among it, numbered so that its parts differ."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    text = "".join(f"{i}. {LINES[i % len(LINES)]}" + ("\r\n" if i % 7 == 0 else "\n") for i in range(2000))
    path.write_bytes(text.encode())
    return path


@pytest.fixture(scope="session")
def model(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens made by mlxdet."""
    return train_tokenizer([str(book)], 400, tmp_path_factory.mktemp("model") / "book.model")


@pytest.fixture(scope="session")
def lossy(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with sentencepiece's own defaults: NFKC, a dummy prefix, no byte fallback, white space squeezed."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(book.read_text("utf-8").replace("😀", "").splitlines()),
        model_writer=out,
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=5,
    )
    path = tmp_path_factory.mktemp("lossy") / "lossy.model"
    path.write_bytes(out.getvalue())
    return path


@pytest.fixture(params=["bytes", "sentencepiece"])
def corpus(request: pytest.FixtureRequest, book: Path, model: Path, tmp_path: Path) -> ByteCorpus | TokenizedCorpus:
    return open_corpus([str(book)], None if request.param == "bytes" else str(model), tmp_path)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines mlxdet.data warned with."""
    lines: list[str] = []
    monkeypatch.setattr(cache.log, "warning", lambda message, *args: lines.append(message % args))
    yield lines
