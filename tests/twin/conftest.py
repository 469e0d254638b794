"""One reference run of each family, made in a process of its own when first asked for."""

import pytest

from tests.conftest import mlxdet
from tests.twin.families import arguments


@pytest.fixture(scope="session")
def model(text, tmp_path_factory):
    """A sentencepiece model of 400 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "text.model"
    done = mlxdet("tokenizer", "train", "--data", str(text), "--vocab", "400", "--out", str(path))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def reference(text, model, tmp_path_factory):
    """Return a function: family -> directory of its uninterrupted run."""
    made = {}

    def get(family):
        if family not in made:
            out = tmp_path_factory.mktemp("reference") / "run"
            done = mlxdet("train", *arguments(family, text, model), "--out", str(out), "--save-every", "0")
            assert done.returncode == 0, done.stderr
            made[family] = out
        return made[family]

    return get
