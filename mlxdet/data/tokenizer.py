"""Text to token ids and back: bytes, or a sentencepiece model.

`mlxdet tokenizer train` makes a BPE model that keeps every text exactly: decode(encode(text)) == text. It has byte
fallback (no unknown token), no normalisation, no dummy prefix, and keeps all white space. Pieces never hold a tab, a
newline or a NUL; those are byte tokens. Sentencepiece writes a space as U+2581 and so reads that character as a
space: here it is spelled in bytes, which any sentencepiece decodes as it should. A model from elsewhere may lose
something (most turn newlines into spaces); `round_trip` says which kind it is.

Training is repeatable: BPE counts integers, in one thread, and neither path nor time enters the model, so the same
text gives the same file. That holds for one version of sentencepiece, which the manifest records.
"""

import contextlib
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from mlxdet.data.demo import NAME, demo_text
from mlxdet.data.sources import Source, find_sources, readable, units
from mlxdet.errors import UsageError

TRAIN_BYTES = (
    1 << 26
)  # a longer text is thinned to about this much, every k-th unit: training takes 10 times as much RAM
MIN_VOCAB = 260  # <unk>, <s>, </s>, the 256 bytes, and one piece
MAX_VOCAB = 1 << 20
WORD = 4096  # characters of a training sentence; BPE aborts the process on a word longer than 65535
RESERVED = re.compile("[\x00\t\n\r\u2581\u2585]+")  # the trainer skips a whole sentence with NUL, U+2585 or a tab in it
SPACE = "\u2581"
PROBES = ("a b", "  two", "a ", " \n", "a\nb", "x\r\n", "tab\tx", "é\u0301", "\U0001f600", "\x00", "\ufffd", "ａｂｃ")


class Tokenizer(Protocol):
    """What a corpus needs: text -> ids in [0, vocab_size) -> text."""

    kind: str  # "bytes" or "sentencepiece"
    vocab_size: int
    digest: str  # SHA-256 of the model file, hex; "" for bytes
    round_trip: bool  # decode(encode(text)) == text for every text

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int32 (n,). Raises UsageError if it holds half a surrogate pair."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError on an id out of range."""


def _checked(ids: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64).ravel()
    if array.size and (array.min() < 0 or array.max() >= vocab):
        raise ValueError(f"token ids from {array.min()} to {array.max()} do not fit a vocabulary of {vocab}")
    return array


class ByteTokenizer:
    """Each byte of the UTF-8 text is its own token; the vocabulary is 256."""

    kind = "bytes"
    vocab_size = 256
    digest = ""
    round_trip = True

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of `text`, int32 (n,); those of an argument that is not UTF-8 are kept (surrogateescape)."""
        try:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)
        except UnicodeEncodeError as error:
            raise _half_surrogate(error) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError on an id out of range."""
        return _checked(ids, 256).astype(np.uint8).tobytes().decode("utf-8", "replace")


class SentencePieceTokenizer:
    """A sentencepiece model of any make."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, name: str):
        import sentencepiece

        sentencepiece.set_min_log_level(5)  # its log goes to standard error, past Python
        try:
            if not model:
                raise RuntimeError("empty")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError):
            raise UsageError(f"{name}: not a sentencepiece model; `mlxdet tokenizer train` makes one") from None
        self.vocab_size = int(self._model.vocab_size())
        self.digest = hashlib.sha256(model).hexdigest()
        self.version: str = sentencepiece.__version__
        self.unknown_id = int(self._model.unk_id())
        self._bytes = {self._model.piece_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        self._bytes.pop(self.unknown_id, None)  # what a model without byte fallback answers
        self._space = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self.round_trip = all(self._model.decode(self._model.encode(probe)) == probe for probe in PROBES)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int32 (n,). Raises UsageError if it holds half a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _half_surrogate(error) from None
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)  # as a corpus is encoded
        return np.fromiter(chain.from_iterable(self.encode_units(lines)), np.int32)

    def encode_units(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, encoded on its own."""
        many = (
            sum(map(len, texts)) > 1 << 16
        )  # a list is spread over threads: starting them costs more than a short text
        ids: list[list[int]] = self._model.encode(texts) if many else [self._model.encode(text) for text in texts]
        if self.round_trip:
            for i, text in enumerate(texts):
                if SPACE in text:
                    ids[i] = self._spelled(text)
        return ids

    def _spelled(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE)):
            ids += self._space if i else []
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises ValueError on an id out of range."""
        return self._model.decode(_checked(ids, self.vocab_size).tolist())

    def byte_length(self, token: int) -> int:
        """Return how many bytes of text a token stands for; meaningful where `round_trip` holds."""
        return 1 if token in self._bytes else len(self._model.id_to_piece(token).replace(SPACE, " ").encode())


def load_tokenizer(path: str | None) -> ByteTokenizer | SentencePieceTokenizer:
    """Return the tokenizer in the file `path`, or the byte tokenizer for None.

    Raises UsageError, naming the path, if it is missing, a directory, unreadable, or not a sentencepiece model.
    """
    if path is None:
        return ByteTokenizer()
    name = os.fspath(path)
    if os.path.isdir(name):
        raise UsageError(f"{name}: is a directory, not a tokenizer; give the sentencepiece model file")
    with readable(name), open(name, "rb") as file:
        return SentencePieceTokenizer(file.read(), name)


def _half_surrogate(error: UnicodeEncodeError) -> UsageError:
    return UsageError(f"the text is not valid Unicode: character {error.start + 1} is half of a surrogate pair")


def train_tokenizer(files: Sequence[str], vocab: int, out: str | Path) -> Path:
    """Train a sentencepiece BPE model of exactly `vocab` tokens on text files or directories, and write it to `out`.

    No files: the embedded corpus. The same text, vocabulary and sentencepiece version give the same bytes. Raises
    UsageError if the text is not UTF-8 or cannot be read, if the vocabulary does not suit it (naming the bound), or if
    `out` exists or cannot be written.
    """
    path = Path(out)
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise UsageError(f"--vocab: {vocab} is out of range; give a whole number from {MIN_VOCAB} to {MAX_VOCAB}")
    if path.exists():
        raise UsageError(f"{path}: exists already; remove it or name another file")
    sources = find_sources(files) if files else [Source(NAME, len(text := demo_text()), text)]
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        with open(handle, "wb") as file:
            file.write(_train(_sentences(sources), vocab))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return path


def _sentences(sources: Sequence[Source]) -> list[str]:
    """The text as training sentences: without the characters the trainer would drop a sentence for, none too long."""
    stride = -(-sum(source.size for source in sources) // TRAIN_BYTES)
    found: list[str] = []
    for source in sources:
        for i, unit in enumerate(units(source)):
            if i % stride == 0:
                for part in RESERVED.split(unit.text):
                    found += [part[start : start + WORD] for start in range(0, len(part), WORD)]
    return found


def _train(sentences: list[str], vocab: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    if not any(map(str.strip, sentences)):
        raise UsageError("the text is too short to train a tokenizer: it holds no visible character")
    sentencepiece.set_min_log_level(5)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab,
            hard_vocab_limit=False,  # a text too small for `vocab` ends with fewer pieces, counted below
            byte_fallback=True,
            character_coverage=0.9995,  # rarer characters are spelled in bytes
            required_chars=SPACE,  # or a text without spaces gives a model that has none
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            max_sentence_length=8 * WORD,
            num_threads=1,
            minloglevel=5,
        )
        size = int(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size())
    except RuntimeError as error:  # its texts are C++ assertions
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if needed:
            raise UsageError(f"--vocab: {vocab} is too small: the characters of the text need {needed[1]}") from None
        raise UsageError(f"sentencepiece could not train a vocabulary of {vocab} on this text") from error
    if size < vocab:
        raise UsageError(f"--vocab: {vocab} is too large for this text; give {size} or less")
    return model.getvalue()
