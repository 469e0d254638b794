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
from mlxdet.data.packing import RecordBatches
from mlxdet.errors import UsageError
from mlxdet.training import base, provenance
from mlxdet.training.corpora import AnyCorpus, batches_of, corpus_diff, open_corpus_of
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
    config = base.shaped(config or TrainConfig()).resolve()
    backend = backends.activate(config.loop.device, config.loop.kernels)
    config = replace(config, loop=replace(config.loop, device=backend.name))
    where = Path(out) if out is not None else _free_name(config)
    corpus = open_corpus_of(config)
    if config.tune.base is None:
        return start(config, corpus, backend, where, {}, overwrite, listener or Quiet(), lambda run: None)
    base.check_tokenizer(config.tune.base, corpus)
    weights, origin = base.read(config.tune.base)
    return start(config, corpus, backend, where, {"base": origin}, overwrite, listener or Quiet(),
                 lambda run: base.publish(run, weights))  # fmt: skip


def start(
    config: TrainConfig,
    corpus: AnyCorpus,
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

    batches = batches_of(config, corpus)
    described = corpus.describe()
    unit, train, val = (
        ("rows", batches.train_rows, batches.val_rows)
        if isinstance(batches, RecordBatches)
        else ("tokens", batches.train_tokens, batches.val_tokens)
    )
    adapters = {"trainable": _parameters(config, corpus.vocab_size, trained=True)} if config.tune.lora_rank else {}
    manifest = {
        "format": 1,
        "config": config.as_dict(),
        "recipe": recipe(config, described, origin.get("base", {}).get("digest")),
        "argv": sys.argv,
        "corpus": described,
        f"train_{unit}": train,
        f"val_{unit}": val,
        "parameters": _parameters(config, corpus.vocab_size),
        **adapters,
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
    config = run.config.replace(**(changes or {})).resolve()
    rolled_back = any(r.get("detour") for r in run.records())
    decisive = configs.differences(run.config, config, rolled_back)
    for name in {*configs.TUNE, *configs.ROWS} & {*(changes or {})}:  # of no effect on a run of another kind
        if not decisive and configs.value(config, name) != configs.value(run.config, name):
            decisive = [(name, configs.value(run.config, name), configs.value(config, name))]
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
    batches = batches_of(config, corpus)
    run.acquire()
    try:
        base.complete(run)
        return Trainer(run, config, corpus, batches, backend, listener or Quiet()).train([list(d) for d in differ])
    finally:
        run.release()


def _parameters(config: TrainConfig, vocab: int, trained: bool = False) -> int:
    """Return the number of weights of the model without adapters, or of those that are trained."""
    from mlxdet.model.gpt import shapes  # imports MLX
    from mlxdet.training.states import trained_shapes

    table = trained_shapes(config, vocab) if trained else shapes(config.model, vocab)
    return sum(int(np.prod(shape)) for shape in table.values())


def _free_name(config: TrainConfig) -> Path:
    first, n = f"runs/{config.model.preset}-s{config.seeds.seed}", 1
    while Path(name := first if n == 1 else f"{first}-{n}").exists():
        n += 1
    return Path(name)
