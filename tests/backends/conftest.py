"""A fresh interpreter: what MLX, the loader and mlxdet do at the start of a process can only be seen in a new one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


def start(code: str, *flags: str, **env: str | None) -> "subprocess.Popen[str]":
    """Start `code` in a new interpreter; a variable given as None is unset there."""
    # Two threads for every BLAS, so that a test does not depend on the machine.
    merged = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "2", **env}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        env={k: v for k, v in merged.items() if v is not None},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for a process that start() started."""
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def begin() -> Callable[..., "subprocess.Popen[str]"]:
    return start


@pytest.fixture(scope="session")
def python() -> Python:
    """Run `code` in a new interpreter and return what it did."""
    return lambda code, *flags, **env: finish(start(code, *flags, **env))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """A cache directory of this test run's own, with the library and the header that take seconds to make."""
    path = tmp_path_factory.mktemp("cache")
    done = finish(start("from mlxdet import backends; backends.activate('cpu')", XDG_CACHE_HOME=str(path)))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory) -> Callable[[str, str], Path]:
    """Compile C source into a shared library and return its path."""

    def build(name: str, source: str) -> Path:
        path = tmp_path_factory.mktemp("library") / name
        subprocess.run(
            ["g++", "-x", "c", "-shared", "-fPIC", "-", "-o", str(path)], input=source, text=True, check=True
        )
        return path

    return build
