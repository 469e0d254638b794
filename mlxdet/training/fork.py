"""A fork: a new run that continues an old one from a checkpoint, with something changed on purpose.

The new run holds the old one's log up to there and its checkpoint, and its manifest says where it comes from and what
was changed, so that `diverge` shows the change as the cause.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxdet import backends
from mlxdet import config as configs
from mlxdet.errors import UsageError
from mlxdet.training import checkpoint
from mlxdet.training.corpora import open_corpus_of
from mlxdet.training.loop import start
from mlxdet.training.run import METRICS, VALIDATION, Run, line
from mlxdet.training.trainer import Listener, Quiet

SHAPE = ("preset", "depth", "layers", "width", "heads", "context", "mlp")


def fork(
    path: str | Path,
    at: int,
    out: str | Path,
    changes: dict[str, Any],
    *,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Train a new run in `out` from the checkpoint of step `at` of the run in `path`, with `changes` by field name.

    A changed seed is also that of the data, where the old run's were one. What a number was derived from (min_lr from
    max_lr) stays as the old run had it, unless it is changed too. Raises UsageError, before anything is written, if
    there is no such checkpoint, or it does not fit what was changed (another shape, vocabulary or context).
    """
    parent = Run(path)
    saved = parent.load(at)
    old = parent.config
    changes = dict(changes)
    if "seed" in changes and "data_seed" not in changes and old.seeds.data_seed == old.seeds.seed:
        changes["data_seed"] = changes["seed"]
    config = old.replace(**changes).resolve()
    shapes = [name for name in SHAPE if getattr(config.model, name) != getattr(old.model, name)]
    if shapes:
        raise UsageError(f"{configs.flag(shapes[0])}: a fork goes on with the weights of step {at}, and so their shape")
    if config.seeds.init_seed != old.seeds.init_seed:
        raise UsageError("--init-seed: the initial weights are long past in a fork; train a new run for that")
    if config.optim.steps <= at:
        raise UsageError(f"--steps: the fork is at step {at} already; give more steps than that")
    backend = backends.activate(config.loop.device, config.loop.kernels)
    config = replace(config, loop=replace(config.loop, device=backend.name))
    corpus = open_corpus_of(config)
    table = saved.weights["token_embedding.weight"]
    if corpus.vocab_size != table.shape[0]:
        raise UsageError(f"{path}: the weights have {table.shape[0]} token ids, this text {corpus.vocab_size}")
    changed = [[name, *values] for name, *values in configs.differences(old, config)]
    if corpus.describe()["digest"] != parent.manifest["corpus"]["digest"]:
        changed.append(["corpus", parent.manifest["corpus"]["digest"], corpus.describe()["digest"]])
    tokens = next((r["tokens"] for r in parent.records() if r["step"] == at), None)
    if tokens is None:
        raise UsageError(f"{parent.path / METRICS}: has no line of step {at}")
    origin = {"run": str(parent.path), "recipe": parent.recipe, "step": at, "tokens": tokens, "changed": changed}

    def begin(run: Run) -> None:
        for name in (METRICS, VALIDATION):
            lines = [line(r) for r in parent.records(name) if r["step"] <= at]
            (run.path / name).write_text("".join(text + "\n" for text in lines))
        checkpoint.save(run.checkpoints, saved, run.recipe)

    return start(config, corpus, backend, Path(out), {"forked": origin}, overwrite, listener or Quiet(), begin)
