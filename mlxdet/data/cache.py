"""A file of token ids that can be trusted: keyed by content, checked in full when read, published in one step.

Layout: 64 bytes of prologue (magic, length of the ids, length of the notes, BLAKE2b-256 of the notes), then the ids
(little-endian, uint8, uint16 or uint32), then the notes (JSON: key, width, vocabulary, BLAKE2b-256 of the ids, and
what the builder adds). Every byte is covered: by the magic, by the length of the file, or by a digest.

A file that is damaged, cut short, or not the one that was asked for is built again, with one line of warning. It is
written under a name of its own and renamed into place, so readers never see part of one, and two processes that build
the same file at once each finish with the same bytes. Nothing is ever changed in place: a file in use can be replaced
safely.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxdet.errors import UsageError

log = logging.getLogger("mlxdet")

MAGIC = b"mlxdet token ids"
PROLOGUE = 64
CHUNK = 1 << 22
STALE = 24 * 3600  # seconds after which a half-written file is taken for the remains of a killed process


class Damaged(Exception):
    """The cache file is not what it claims to be; the message says how."""


@dataclass(frozen=True)
class Entry:
    """The content of a cache file: ids (1-D, memory-mapped, read-only) and the builder's notes."""

    tokens: np.ndarray
    notes: dict[str, Any]
    checksum: str  # BLAKE2b-256 of the ids as they lie in the file


def default_dir() -> Path:
    """Return mlxdet/ in $XDG_CACHE_HOME, or in the user's cache directory (macOS: ~/Library/Caches, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative values ignored
        return Path(base) / "mlxdet"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise UsageError("no home directory to cache token ids in; name a directory with --cache-dir") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "mlxdet"


def width(vocab: int) -> np.dtype[Any]:
    """Return the narrowest of uint8, uint16 and uint32 (little-endian) that holds every id below `vocab`."""
    return np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


class Writer:
    """Collects ids in a file, checking each against the vocabulary."""

    def __init__(self, file: Any, vocab: int):
        self._file, self.vocab, self.dtype = file, vocab, width(vocab)
        self._hash = hashlib.blake2b(digest_size=32)
        self.count = 0

    def write(self, ids: np.ndarray) -> None:
        """Append ids (any integer type). Raises UsageError if one is not in [0, vocab): an id never wraps."""
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
            raise UsageError(f"token ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab}")
        raw = ids.astype(self.dtype).tobytes()
        self._hash.update(raw)
        self._file.write(raw)
        self.count += ids.size

    def finish(self, key: str, notes: dict[str, Any]) -> None:
        """Write the notes and the prologue, and flush all to the disk."""
        record = {**notes, "key": key, "vocab": self.vocab, "dtype": self.dtype.str, "checksum": self._hash.hexdigest()}
        text = json.dumps(record, sort_keys=True).encode()
        self._file.write(text)
        self._file.seek(0)
        size = self.count * self.dtype.itemsize
        digest = hashlib.blake2b(text, digest_size=32).digest()
        self._file.write(MAGIC + size.to_bytes(8, "little") + len(text).to_bytes(8, "little") + digest)
        self._file.flush()
        os.fsync(self._file.fileno())


def fetch(directory: Path | None, key: str, vocab: int, build: Callable[[Writer], dict[str, Any]]) -> Entry:
    """Return the entry `key` from the cache in `directory` (None: the default one), built first if it is not there.

    `build` appends the ids to the Writer and returns the notes. Raises UsageError if the directory cannot be used.
    """
    folder = default_dir() if directory is None else Path(directory)
    path = folder / f"{key}.ids"
    try:
        return load(path, key, vocab)
    except FileNotFoundError:
        pass
    except Damaged as error:
        log.warning("%s: %s; building it again", path, error)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        handle, name = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        with open(handle, "wb") as file:
            file.write(bytes(PROLOGUE))
            writer = Writer(file, vocab)
            notes = build(writer)
            writer.finish(key, notes)
        os.replace(name, path)
        _sync(folder)
        return load(path, key, vocab)
    except OSError as error:
        raise _unusable(path, error) from error
    except Damaged as error:
        raise UsageError(f"{path}: {error}, right after it was written; is the disk sound?") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def load(path: Path, key: str, vocab: int) -> Entry:
    """Return the entry in `path`, checked in full. Raises Damaged, or OSError if the file cannot be read."""
    with open(path, "rb") as file:
        head = file.read(PROLOGUE)
        if len(head) < PROLOGUE or head[:16] != MAGIC:
            raise Damaged("not a file of token ids")
        size, length = int.from_bytes(head[16:24], "little"), int.from_bytes(head[24:32], "little")
        actual = os.fstat(file.fileno()).st_size
        if actual != PROLOGUE + size + length:
            raise Damaged(f"{actual} bytes long, not {PROLOGUE + size + length}")
        file.seek(PROLOGUE + size)
        text = file.read(length)
        if hashlib.blake2b(text, digest_size=32).digest() != head[32:]:
            raise Damaged("its notes are damaged")
        notes = json.loads(text)
        dtype = width(vocab)
        if [notes.get(name) for name in ("key", "vocab", "dtype")] != [key, vocab, dtype.str] or size % dtype.itemsize:
            raise Damaged("it belongs to another text or tokenizer")
        count = size // dtype.itemsize
        tokens: np.ndarray = np.zeros(0, dtype)
        if count:  # an ndarray on the map, not a np.memmap: that subclass makes each slice slower
            tokens = np.asarray(np.memmap(file, dtype, mode="r", offset=PROLOGUE, shape=(count,)))
    checksum, highest = hashlib.blake2b(digest_size=32), 0
    for start in range(0, count, CHUNK):
        part = tokens[start : start + CHUNK]
        checksum.update(part.data)
        highest = max(highest, int(part.max()))
    if checksum.hexdigest() != notes["checksum"]:
        raise Damaged("its token ids are damaged")
    if highest >= vocab:
        raise Damaged(f"it holds token id {highest}, outside the vocabulary of {vocab}")
    return Entry(tokens, notes, notes["checksum"])


def _unusable(path: Path, error: OSError) -> UsageError:
    reason = error.strerror or error
    return UsageError(f"{path}: cannot cache token ids here: {reason}; --cache-dir names another directory")


def _sync(folder: Path) -> None:
    """Flush the directory, so that the rename survives a power cut; not every file system allows it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half-written; a file still being written has a recent time stamp."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink()
