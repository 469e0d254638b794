"""The fingerprint: equal on equal machines, different where bits may differ, and nothing private in it."""

import getpass
import json
import os
import socket

import pytest

from mlxdet.backends import Backend
from mlxdet.backends.fingerprint import HARMLESS, fingerprint

CODE = "import json\nfrom mlxdet import backends\nprint(json.dumps(backends.activate('cpu').fingerprint()))"


def of(python, cache, **env):
    done = python(CODE, XDG_CACHE_HOME=str(cache), **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def usual(python, cache):
    return of(python, cache)


def test_another_process_user_and_place_have_the_same(python, cache, usual, tmp_path):
    again = of(python, cache, HOME=str(tmp_path), TMPDIR=str(tmp_path), USER="someone", PYTHONHASHSEED="3")
    assert again == usual


def test_keys_are_sorted_and_json_keeps_it(usual):
    for part in usual.values():
        assert list(part) == sorted(part)
    assert set(usual) == {"decides", "notes"}


def test_it_says_what_decides_bits_on_a_cpu(usual):
    assert {"blas", "compiler", "device", "libc", "machine", "mlx", "processor", "system", "variables"} <= set(
        usual["decides"]
    )
    assert {"numpy", "python", "system_release"} <= set(usual["notes"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLXDET_BLAS", "none"),
        ("MLX_DISABLE_COMPILE", "1"),
        ("MLX_SOMETHING_NEW", "1"),
    ],
)
def test_what_may_change_bits_changes_what_decides(python, cache, usual, name, value):
    changed = of(python, cache, **{name: value})
    assert changed["decides"] != usual["decides"]


def test_the_number_of_threads_of_the_blas_decides(python, cache, usual):
    if usual["decides"]["blas"].get("threads") != 2:
        pytest.skip("no OpenBLAS here, or a single core")
    changed = of(python, cache, OPENBLAS_NUM_THREADS="1")["decides"]
    assert (changed["blas"].pop("threads"), usual["decides"]["blas"]["threads"]) == (1, 2)


@pytest.mark.parametrize("name", sorted(HARMLESS)[:2])
def test_what_cannot_change_bits_is_a_note(python, cache, usual, name):
    changed = of(python, cache, **{name: "20"})
    assert changed["decides"] == usual["decides"]
    assert changed["notes"]["variables"] == {name: "20"}


def test_a_path_is_not_told_but_told_apart(backend, monkeypatch):
    said = []
    for path in ("/home/someone/a", "/home/someone/b"):
        monkeypatch.setenv("MLX_SOMETHING_NEW", path)
        said.append(fingerprint(backend)["decides"]["variables"]["MLX_SOMETHING_NEW"])
    assert said[0] != said[1]
    assert all(s.startswith("path:") and "someone" not in s for s in said)


def test_no_host_user_or_path_decides(backend):
    text = json.dumps(backend.fingerprint()["decides"])
    private = [os.path.expanduser("~"), os.getcwd()]
    private += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4]
    assert not [name for name in private if f'"{name}' in text or f"{name}/" in text]


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_gpus_fingerprint_can_be_made_of_what_is_known(name):
    """Here MLX knows only the CPU: the parts must still come together without an error."""
    found = json.loads(json.dumps(fingerprint(Backend(name, "deterministic", {"MLX_ENABLE_TF32": "0"}))))["decides"]
    assert found["device"] == name
    assert "blas" not in found
    assert ("cuda" in found) == (name == "cuda")
