"""A corpus: one long sequence of token ids, made of one file, several, or the embedded text.

`ByteCorpus` takes the bytes of the files as they are, one token each (byte order marks, NULs and invalid UTF-8
included). `TokenizedCorpus` encodes UTF-8 text with a sentencepiece model, unit by unit (see sources.py), and keeps
the ids in a cache file that is checked in full when it is read. Both follow one file directly by the next.

Memory is bounded: up to 64 MB of bytes are held in RAM (so that editing the file does not disturb a run), anything
larger is memory-mapped, and several large files are joined once in the cache. Cached ids are always memory-mapped.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxdet.data import cache
from mlxdet.data.demo import NAME, demo_note, demo_text
from mlxdet.data.sources import Source, Unit, byte_order_mark, changed, find_sources, readable, units
from mlxdet.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from mlxdet.errors import UsageError

log = logging.getLogger("mlxdet")

IN_MEMORY = 1 << 26  # bytes
BLOCK = 1 << 18  # bytes of text per entry of the table that finds a token's place in the text
SCAN = 1 << 20  # bytes per entry of the table of newlines of a byte corpus
CACHE_FORMAT = "1"  # part of the key: another way to encode must not find the old ids


@dataclass(frozen=True)
class Location:
    """A place in a text: file, byte offset in it (from 0) and physical line (from 1)."""

    file: str
    offset: int
    line: int


class Corpus(Protocol):
    """What training reads. Ids are in [0, vocab_size): checked when the corpus is opened."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def tokens(self) -> np.ndarray:
        """The ids, 1-D, uint8, uint16 or uint32; read-only, memory-mapped where large."""

    @property
    def digest(self) -> str:
        """32 hex: of the text (and of tokenizer and ids), independent of paths and of the cache."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the ids."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop - 1, int32. Raises IndexError unless 0 <= start <= stop <= len."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`."""

    def where(self, index: int) -> Location:
        """Return where token `index` lies in the text. Raises IndexError out of range."""

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records: kind, files, tokens, vocab, digest."""


def open_corpus(
    paths: Sequence[str], tokenizer: str | None, cache_dir: Path | None, unk_limit: float = 0.01
) -> "ByteCorpus | TokenizedCorpus":
    """Open the text in `paths` (files, directories; none: the embedded text) with a sentencepiece model, or as bytes.

    `cache_dir`: where token ids are kept (None: the user's cache directory). `unk_limit`: largest accepted share of
    unknown tokens. Raises UsageError for what cannot be read, is empty, is not text, or does not suit the tokenizer.
    """
    sources = find_sources(paths) if paths else [Source(NAME, len(text := demo_text()), text)]
    directory = None if cache_dir is None else Path(cache_dir)
    model = load_tokenizer(tokenizer)
    if isinstance(model, ByteTokenizer):
        return ByteCorpus(sources, directory)
    return TokenizedCorpus(sources, model, directory, unk_limit)


class _Corpus:
    """What both kinds share. `_files` has one record (name, bytes, sha256) per file."""

    tokens: np.ndarray
    digest: str
    tokenizer: Tokenizer
    _files: list[dict[str, Any]]
    _sources: Sequence[Source]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop - 1, int32. Raises IndexError unless 0 <= start <= stop <= len."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} are not within the {len(self)} of the corpus")
        return self.tokens[start:stop].astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`. Raises ValueError on an id out of range."""
        return self.tokenizer.decode(ids)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"token {index} is not within the {len(self)} of the corpus")

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records: kind, files (name, bytes, SHA-256), tokens, vocab, digest.

        For the embedded text also which Python it came from: its content, and so the digest, differs between versions.
        """
        embedded = demo_note() if self._sources[0].data is not None else {}
        record = {"tokens": len(self), "vocab": self.vocab_size, "digest": self.digest, "files": self._files}
        return {"kind": self.tokenizer.kind, **record, **embedded}


class ByteCorpus(_Corpus):
    """The bytes of the files, untouched; the vocabulary is 256."""

    def __init__(self, sources: Sequence[Source], cache_dir: Path | None):
        self.tokenizer, self._sources = ByteTokenizer(), sources
        self._starts = np.cumsum([0] + [source.size for source in sources])
        self._newlines: dict[int, np.ndarray] = {}
        total = int(self._starts[-1])
        held = bytearray() if total <= IN_MEMORY else None
        self._files, self.digest = _hash_bytes(sources, held)
        if held is not None:
            self.tokens = np.frombuffer(held, np.uint8)
            self.tokens.flags.writeable = False
        elif len(sources) == 1:
            self.tokens = _mapped(sources[0])
        else:
            self.tokens = cache.fetch(cache_dir, f"bytes-{self.digest}", 256, self._join).tokens

    def _join(self, writer: cache.Writer) -> dict[str, Any]:
        check = _byte_hash()
        for source in self._sources:
            for chunk in source.chunks():
                check.update(chunk)
                writer.write(np.frombuffer(chunk, np.uint8))
        if check.hexdigest() != self.digest:
            raise changed(", ".join(source.name for source in self._sources))
        return {}

    def where(self, index: int) -> Location:
        """Return where token `index` lies. The first call for a file counts its newlines. Raises IndexError."""
        self._check(index)
        k = int(np.searchsorted(self._starts, index, side="right")) - 1  # the last file starting here: skips empty ones
        start, offset = int(self._starts[k]), index - int(self._starts[k])
        if k not in self._newlines:
            text = self.tokens[start : int(self._starts[k + 1])]
            counts = [np.count_nonzero(text[i : i + SCAN] == 10) for i in range(0, len(text), SCAN)]
            self._newlines[k] = np.cumsum([0, *counts])
        block = offset // SCAN
        rest = np.count_nonzero(self.tokens[start + block * SCAN : index] == 10)
        return Location(self._files[k]["name"], offset, int(self._newlines[k][block] + rest) + 1)


def _mapped(source: Source) -> np.ndarray:
    with readable(source.name), source.open() as file:
        try:  # an ndarray on the map, not a np.memmap: that subclass makes slices slower
            return np.asarray(np.memmap(file, np.uint8, mode="r", shape=(source.size,)))
        except ValueError:  # the file is shorter by now
            raise changed(source.name) from None


def _byte_hash() -> Any:
    return hashlib.blake2b(b"mlxdet bytes 1\x00", digest_size=16)


def _hash_bytes(sources: Sequence[Source], held: bytearray | None) -> tuple[list[dict[str, Any]], str]:
    """Read all sources once, into `held` if there is one; return the files' records and the digest of the whole."""
    whole, files = _byte_hash(), []
    for source in sources:
        own = hashlib.sha256()
        for chunk in source.chunks():
            own.update(chunk)
            whole.update(chunk)
            if held is not None:
                held += chunk
        files.append({"name": source.name, "bytes": source.size, "sha256": own.hexdigest()})
    return files, whole.hexdigest()


class TokenizedCorpus(_Corpus):
    """UTF-8 text encoded with a sentencepiece model."""

    tokenizer: SentencePieceTokenizer

    def __init__(
        self, sources: Sequence[Source], tokenizer: SentencePieceTokenizer, cache_dir: Path | None, unk_limit: float
    ):
        self.tokenizer, self._sources = tokenizer, sources
        self._files, _ = _hash_bytes(sources, None)
        text = [record["sha256"] for record in self._files]
        key = _digest("cache", CACHE_FORMAT, tokenizer.digest, tokenizer.version, *text)
        entry = cache.fetch(cache_dir, f"tokens-{key}", tokenizer.vocab_size, self._build)
        self.tokens = entry.tokens
        self.digest = _digest("tokens", tokenizer.digest, str(tokenizer.vocab_size), entry.checksum, *text)
        self._unknown, self._bom, self._table = entry.notes["unknown"], entry.notes["bom"], entry.notes["table"]
        share = self._unknown / max(1, len(self))
        if not len(self):
            raise UsageError(f"{sources[0].name}: the tokenizer finds no token in the text")
        if share > unk_limit:
            raise UsageError(
                f"{self._unknown} of {len(self)} tokens ({share:.2%}) are unknown to the tokenizer, more than "
                f"{unk_limit:.2%}; train one with byte fallback (`mlxdet tokenizer train`), or raise --unk-limit"
            )

    def _build(self, writer: cache.Writer) -> dict[str, Any]:
        """Encode all sources into `writer`; the table holds (first token, file, byte offset, line) of every block."""
        log.info("encoding %d bytes of text; this is done once, and cached", sum(f["bytes"] for f in self._files))
        table: list[list[int]] = []
        unknown, marked = 0, 0
        for k, source in enumerate(self._sources):
            mark = byte_order_mark(source)
            check = hashlib.sha256(mark)
            for block in _blocks(source):
                for unit in block:
                    check.update(unit.raw)
                table.append([writer.count, k, block[0].offset, block[0].line])
                ids = self._encode(block)
                unknown += int(np.count_nonzero(ids == self.tokenizer.unknown_id))
                writer.write(ids)
            if check.hexdigest() != self._files[k]["sha256"]:
                raise changed(source.name)
            marked += bool(mark)
        return {"unknown": unknown, "bom": marked, "table": table}

    def _encode(self, block: Sequence[Unit]) -> np.ndarray:
        ids = self.tokenizer.encode_units([unit.text for unit in block])
        return np.fromiter(chain.from_iterable(ids), np.int64, sum(map(len, ids)))

    def where(self, index: int) -> Location:
        """Return where token `index` lies; where the tokenizer does not keep the text exactly, the start of its line.

        Encodes up to 256 KiB of text again. Raises IndexError out of range, UsageError if the text has changed.
        """
        self._check(index)
        row = int(np.searchsorted(np.array([entry[0] for entry in self._table]), index, side="right")) - 1
        token, k, offset, line = self._table[row]
        source = self._sources[k]
        for unit in units(source, offset, line):
            ids = self.tokenizer.encode_units([unit.text])[0]
            if not np.array_equal(self.tokens[token : token + len(ids)], ids):
                break
            if index < token + len(ids):
                before = ids[: index - token] if self.tokenizer.round_trip else []
                return Location(source.name, unit.offset + sum(map(self.tokenizer.byte_length, before)), unit.line)
            token += len(ids)
        raise UsageError(f"{source.name}: the text is no longer the one that was encoded; its tokens cannot be placed")

    def describe(self) -> dict[str, Any]:
        """As of every corpus, and the tokenizer, the unknown tokens, and how many byte order marks were dropped."""
        model = {"digest": self.tokenizer.digest, "vocab": self.vocab_size, "round_trip": self.tokenizer.round_trip}
        return {
            **super().describe(),
            "tokenizer": {**model, "sentencepiece": self.tokenizer.version},
            "unknown": self._unknown,
            "unknown_share": self._unknown / len(self),
            "byte_order_marks_dropped": self._bom,
        }


def _blocks(source: Source) -> Iterator[list[Unit]]:
    """Yield the units of a source in groups of at least BLOCK bytes (the last may be smaller)."""
    block: list[Unit] = []
    size = 0
    for unit in units(source):
        block.append(unit)
        size += len(unit.raw)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _digest(*parts: str) -> str:
    """32 hex of BLAKE2b-16 over the parts, each ended by a NUL (none holds one)."""
    return hashlib.blake2b("".join(part + "\x00" for part in parts).encode(), digest_size=16).hexdigest()
