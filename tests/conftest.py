"""Shared by all tests: the command line in a process of its own, and a text to train on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdet import backends

# Two workers with two spinning BLAS threads each would fight over two cores. `evals/determinism-smoke` runs with all.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before any test module imports MLX: a BLAS can only be loaded first.
BACKEND = backends.activate("cpu")


def mlxdet(*args: str, command=(sys.executable, "-m", "mlxdet"), timeout: float = 300, **env: str):
    """Run the command line in a new process and return what it did."""
    return subprocess.run(
        [*command, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Fifty kilobytes of English."""
    from mlxdet.data.demo import demo_text

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(demo_text()[:50_000])
    return path


@pytest.fixture(scope="session")
def backend():
    return BACKEND
