"""Train a new run, or take one up again. All is checked before the first step, and before anything is written."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxdet import backends
from mlxdet import config as configs
from mlxdet.config import TrainConfig
from mlxdet.data.text import Corpus
from mlxdet.errors import UsageError
from mlxdet.training import provenance
from mlxdet.training.corpora import corpus_diff, open_corpus_of, text_batches
from mlxdet.training.run import Run, create, recipe
from mlxdet.training.trainer import Listener, Quiet, Trainer


def train(
    config: TrainConfig | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Train a new run in directory `out` (default: a free name under runs/) and return it.

    `run.stopped` is "done", or "interrupted" after SIGINT or SIGTERM (saved, can be resumed). Raises UsageError before
    anything is written, Fault when training had to stop: a non-finite loss, a full disk.
    """
    config = (config or TrainConfig()).resolve()
    backend = backends.activate(config.loop.device, config.loop.kernels)
    config = replace(config, loop=replace(config.loop, device=backend.name))
    where = Path(out) if out is not None else _free_name(config)
    return start(config, open_corpus_of(config), backend, where, {}, overwrite, listener or Quiet(), lambda run: None)


def start(
    config: TrainConfig,
    corpus: Corpus,
    backend: backends.Backend,
    out: Path,
    origin: dict[str, Any],
    overwrite: bool,
    listener: Listener,
    begin: Callable[[Run], None],
) -> Run:
    """Make the run of a resolved config in `out`, let `begin` put there what it starts from, and train it.

    `origin` is added to the manifest. Raises as `train` does.
    """
    from mlxdet.training.audit import audit_for_start  # imports MLX

    batches = text_batches(config, corpus)
    described = corpus.describe()
    manifest = {
        "format": 1,
        "config": config.as_dict(),
        "recipe": recipe(config, described),
        "argv": sys.argv,
        "corpus": described,
        "train_tokens": batches.train_tokens,
        "val_tokens": batches.val_tokens,
        "parameters": _parameters(config, corpus.vocab_size),
        "audit": audit_for_start(config, corpus.vocab_size, backend),
        "environment": backend.fingerprint(),
        "code": provenance.code_identity(),
        **origin,
    }
    run = create(out, manifest, overwrite)
    try:
        begin(run)
        return Trainer(run, config, corpus, batches, backend, listener).train(None)
    finally:
        run.release()


def resume(
    path: str | Path,
    *,
    changes: dict[str, Any] | None = None,
    inexact: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Go on with the run in directory `path` from its newest checkpoint (from the start if it has none) and return it.

    `changes` sets fields that change speed or comfort only; any other is refused with a field-by-field diff. A changed
    corpus is refused. So is a changed environment, unless `inexact` accepts that the rest may have other bits.
    """
    run = Run(path)
    config = run.config.replace(**(changes or {}))
    decisive = configs.differences(run.config, config)
    if decisive:
        diff = "".join(f"\n  {configs.flag(n)}: the run has {a!r}, asked for {b!r}" for n, a, b in decisive)
        raise UsageError(f"{run.path}: a resume cannot change what decides the bits of the run:{diff}")
    backend = backends.activate(config.loop.device, config.loop.kernels)
    corpus = open_corpus_of(config)
    described = corpus.describe()
    if described["digest"] != run.manifest["corpus"]["digest"]:
        raise UsageError(f"{run.path}: the text is not the one this run was trained on:{corpus_diff(run, described)}")
    differ = provenance.environment_differences(run.manifest["environment"], backend.fingerprint())
    if differ and not inexact:
        diff = "".join(f"\n  {n}: the run has {a!r}, here it is {b!r}" for n, a, b in differ)
        raise UsageError(
            f"{run.path}: this is a different environment, so the rest may have other bits:{diff}\n"
            f"Go back to the run's environment, or give --inexact to go on all the same"
        )
    if differ:
        from mlxdet.training.audit import audit_for_start

        audit_for_start(config, corpus.vocab_size, backend)  # the manifest speaks of another environment
    batches = text_batches(config, corpus)
    run.acquire()
    try:
        return Trainer(run, config, corpus, batches, backend, listener or Quiet()).train([list(d) for d in differ])
    finally:
        run.release()


def _parameters(config: TrainConfig, vocab: int) -> int:
    from mlxdet.model.gpt import shapes  # imports MLX

    return sum(int(np.prod(shape)) for shape in shapes(config.model, vocab).values())


def _free_name(config: TrainConfig) -> Path:
    base, n = f"runs/{config.model.preset}-s{config.seeds.seed}", 1
    while Path(name := base if n == 1 else f"{base}-{n}").exists():
        n += 1
    return Path(name)
