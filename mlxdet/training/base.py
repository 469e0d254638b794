"""The weights that a run starts from with --from: read from another run, and kept in the new one's directory.

They are copied, so that a resume hangs on nothing outside the run: the other one may train on, drop its checkpoints or
move. Their content digest is in the manifest and in the recipe; where they came from is a note.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxdet.config import SHAPE, TrainConfig, flag, given_shape
from mlxdet.errors import UsageError
from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import FormatError, from_numpy
from mlxdet.training.checkpoint import saving, sync_directory, sync_file
from mlxdet.training.corpora import AnyCorpus
from mlxdet.training.run import Run
from mlxdet.tuning import lora_scale

FILE = "base.safetensors"
Weights = dict[str, np.ndarray]


def shaped(config: TrainConfig) -> TrainConfig:
    """Return `config` with the shape of the model in its --from, if it has one.

    Raises UsageError where that is no run, or where another shape is asked for.
    """
    if config.tune.base is None:
        return config
    model = Run(config.tune.base).config.model
    for name, asked in given_shape(config.model).items():
        if asked != (has := getattr(model, name)):
            raise UsageError(
                f"{flag(name)}: {asked} is asked for, but the model in {config.tune.base} has {has}; the shape is "
                f"that of --from"
            )
    shape = {name: getattr(model, name) for name in SHAPE}
    return replace(config, model=replace(config.model, preset=model.preset, depth=None, **shape))


def read(path: str | Path, step: int | None = None) -> tuple[Weights, dict[str, Any]]:
    """Return the weights of a run, adapters merged, and what the manifest of one that starts from them says.

    Of the checkpoint after `step` steps, or the newest. Raises UsageError where there is none, or it is damaged.
    """
    from mlxdet.model import lora  # imports MLX

    run = Run(path)
    saved = run.load(step)
    weights = saved.weights
    if run.config.tune.lora_rank:
        frozen = load(run)
        weights = lora.merge(frozen, weights, lora_scale(run.config))
    origin = {"run": str(path), "recipe": run.recipe, "step": saved.step, "digest": lora.base_digest(weights)}
    return weights, origin


def check_tokenizer(path: str | Path, corpus: AnyCorpus) -> None:
    """Raise UsageError unless the run at `path` has the tokenizer of `corpus`: ids would mean other text."""
    run = Run(path)
    has = run.manifest["corpus"].get("tokenizer", {}).get("digest", "")
    if has != corpus.tokenizer.digest:
        name = run.config.data.tokenizer
        way = f"give its --tokenizer {name}" if name else "it reads bytes; leave --tokenizer out"
        raise UsageError(f"--tokenizer: not that of {path}, the run to start from: {way}")


def publish(run: Run, weights: Weights) -> None:
    """Put the base into the directory of a new run, whole or not at all. Raises Fault if the disk is full."""
    final, temporary = run.path / FILE, run.path / (FILE + ".new")
    with saving(str(final), "nothing was trained yet"):
        with temporary.open("wb") as file:
            write_safetensors(file, {name: from_numpy(w) for name, w in weights.items()})
            file.flush()
            sync_file(file.fileno())
        temporary.rename(final)
        sync_directory(run.path)


def complete(run: Run) -> None:
    """Fetch the base of a run that was killed before it had one. Raises UsageError if it is no longer to be had."""
    if run.base is None or (run.path / FILE).exists() or run.steps() or "forked" in run.manifest:
        return
    origin = run.manifest["base"]
    weights, now = read(origin["run"], origin["step"])
    if now["digest"] != run.base:
        raise UsageError(f"{origin['run']}: not the run that {run.path} was to start from any more; train it anew")
    publish(run, weights)


def load(run: Run) -> Weights:
    """Return the base of a run. Raises UsageError unless it is, to the bit, what the run was started from."""
    from mlxdet.model import lora  # imports MLX

    path = run.path / FILE
    if not path.exists():
        raise UsageError(f"{path}: missing; this run cannot go on without the weights that it was started from")
    try:
        tensors, _ = read_safetensors(path)
        weights = {name: t.to_numpy() for name, t in tensors.items()}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except FormatError as error:
        raise UsageError(f"{error}; it is not the base this run was started from") from None
    digest = lora.base_digest(weights)
    if digest != run.base:
        raise UsageError(f"{path}: not the base this run was started from (digest {digest}, the run has {run.base})")
    return weights
