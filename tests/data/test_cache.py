"""The cache of token ids: every damaged byte is seen, nothing half-written is ever read, ids never wrap."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from mlxdet.data import cache
from mlxdet.data.cache import Damaged, Writer, fetch, load
from mlxdet.errors import UsageError

IDS = np.arange(300) * 7 % 1000


def build(writer: Writer) -> dict[str, int]:
    writer.write(IDS[:100])
    writer.write(IDS[100:])
    return {"note": 5}


def refuse(writer: Writer) -> dict[str, int]:
    raise AssertionError("built again")


def test_what_was_built_is_read_back(tmp_path: Path) -> None:
    first = fetch(tmp_path / "a" / "b", "key", 1000, build)
    again = fetch(tmp_path / "a" / "b", "key", 1000, refuse)
    assert first.tokens.tolist() == again.tokens.tolist() == IDS.tolist()
    assert first.notes == again.notes and again.notes["note"] == 5 and first.checksum == again.checksum
    assert os.listdir(tmp_path / "a" / "b") == ["key.ids"] and not again.tokens.flags.writeable


def test_every_flipped_bit_and_every_truncation_is_seen(tmp_path: Path) -> None:
    fetch(tmp_path, "key", 1000, build)
    path = tmp_path / "key.ids"
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        with pytest.raises(Damaged):
            load(path, "key", 1000)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(Damaged):
            load(path, "key", 1000)
    path.write_bytes(good + b"\x00")
    with pytest.raises(Damaged, match="bytes long"):
        load(path, "key", 1000)
    path.write_bytes(good)
    load(path, "key", 1000)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:100] + b"\xff" + raw[101:]])
def test_damaged_file_is_built_again_with_one_warning(tmp_path: Path, warned: list[str], damage: object) -> None:
    fetch(tmp_path, "key", 1000, build)
    path = tmp_path / "key.ids"
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert fetch(tmp_path, "key", 1000, build).tokens.tolist() == IDS.tolist()
    assert path.read_bytes() == good
    assert len(warned) == 1 and str(path) in warned[0] and "building it again" in warned[0]
    fetch(tmp_path, "key", 1000, refuse)
    assert len(warned) == 1


def test_file_of_another_key_or_vocabulary_is_not_taken(tmp_path: Path, warned: list[str]) -> None:
    fetch(tmp_path, "key", 1000, build)
    os.rename(tmp_path / "key.ids", tmp_path / "other.ids")
    for key, vocab in (("other", 1000), ("key", 1001)):
        with pytest.raises(Damaged, match="another"):
            load(tmp_path / "other.ids", key, vocab)


@pytest.mark.parametrize("vocab", [1, 256, 257, 65_535, 65_536, 65_537, 100_000])
def test_ids_never_wrap(tmp_path: Path, vocab: int) -> None:
    ids = np.array(
        sorted({0, vocab // 2, max(0, vocab - 2), vocab - 1} | {i for i in (255, 256, 65_535, 65_536) if i < vocab})
    )
    tokens = fetch(tmp_path, "k", vocab, lambda writer: writer.write(ids) or {}).tokens
    assert tokens.tolist() == ids.tolist()
    assert tokens.dtype.itemsize == (1 if vocab <= 256 else 2 if vocab <= 65_536 else 4)
    for wrong in (-1, vocab, 2**32):
        with pytest.raises(UsageError, match=f"vocabulary of {vocab}"):
            fetch(tmp_path, "w", vocab, lambda writer, i=wrong: writer.write(np.array([0, i])) or {})
    assert os.listdir(tmp_path) == ["k.ids"]


def test_an_id_outside_the_vocabulary_is_seen_on_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose checksums all hold, written by a faulty builder."""

    def write_unchecked(self: Writer, ids: np.ndarray) -> None:
        self.vocab = 1 << 16
        Writer.write_checked(self, ids)
        self.vocab = 1000

    monkeypatch.setattr(Writer, "write_checked", Writer.write, raising=False)
    monkeypatch.setattr(Writer, "write", write_unchecked)
    with pytest.raises(UsageError, match="token id 1000, outside the vocabulary of 1000"):
        fetch(tmp_path, "key", 1000, lambda writer: writer.write(np.array([5, 1000])) or {})


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, UsageError):

        def fail(writer: Writer, error: type[BaseException] = error) -> dict[str, int]:
            writer.write(IDS)
            raise error

        with pytest.raises(error):
            fetch(tmp_path, "key", 1000, fail)
        assert os.listdir(tmp_path) == []


def test_remains_of_a_killed_process_are_swept_and_running_ones_are_not(tmp_path: Path) -> None:
    old, new = tmp_path / "x.1.tmp", tmp_path / "x.2.tmp"
    old.touch(), new.touch()
    os.utime(old, (time.time() - cache.STALE - 60,) * 2)
    fetch(tmp_path, "key", 1000, build)
    assert sorted(os.listdir(tmp_path)) == ["key.ids", "x.2.tmp"]


def _build_slowly(folder: str, start: float) -> None:
    def slow(writer: Writer) -> dict[str, int]:
        for part in np.array_split(IDS, 20):
            writer.write(part)
            time.sleep(0.005)
        return {"note": 5}

    time.sleep(max(0.0, start - time.time()))
    entry = fetch(Path(folder), "key", 1000, slow)
    assert entry.tokens.tolist() == IDS.tolist()


def test_processes_building_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = time.time() + 1.0
    processes = [context.Process(target=_build_slowly, args=(str(tmp_path), start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["key.ids"]
    fetch(tmp_path, "key", 1000, refuse)


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"file.*cannot cache token ids here: .*--cache-dir"):
        fetch(tmp_path / "file", "key", 1000, build)


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.default_dir() == Path("/somewhere/mlxdet")
    for unset in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setattr(cache.sys, "platform", "linux")
        assert cache.default_dir() == Path("/home/me/.cache/mlxdet")
        monkeypatch.setattr(cache.sys, "platform", "darwin")
        assert cache.default_dir() == Path("/home/me/Library/Caches/mlxdet")
