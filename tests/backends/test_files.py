"""Files that processes share appear whole or not at all."""

import os

import pytest

from mlxdet.backends.files import publish


def test_a_published_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            publish(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    publish(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"new"
