"""Shared by all tests: the command line in a process of its own, and a text to train on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdet import backends

# Where the tests run in the background of a script, interrupts are ignored, by us and so by all that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Fifty kilobytes of a language with words, sentences and lines: the same on every Python, unlike the embedded."""
    from mlxdet.seeds import Splitmix64

    def draw(below: int) -> int:
        return rng.random_int(0, below)

    rng = Splitmix64(2026)
    syllables = [c + v for c in "bdfghklmnprstvw" for v in "aeiou"]
    words = ["".join(syllables[draw(len(syllables))] for _ in range(1 + draw(3))) for _ in range(400)]
    written, size = [], 0
    while size < 50_000:
        # The smaller of three draws: some words are much more frequent than others.
        sentence = " ".join(words[min(draw(400), draw(400), draw(400))] for _ in range(4 + draw(9)))
        written.append(sentence.capitalize() + (".\n" if draw(4) == 0 else ". "))
        size += len(written[-1])
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(written)[:50_000])
    return path


@pytest.fixture(scope="session")
def backend():
    return BACKEND
