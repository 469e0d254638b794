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
from mlxdet.training import base, checkpoint
from mlxdet.training.corpora import open_corpus_of
from mlxdet.training.loop import start
from mlxdet.training.run import EVENTS, METRICS, VALIDATION, Run, line, timeline
from mlxdet.training.trainer import Listener, Quiet

# What a checkpoint holds and stands on.
FIXED = ("preset", "depth", *configs.SHAPE, "base", "lora_rank", "lora_targets")


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
    there is no such checkpoint, it does not fit what was changed (another shape, vocabulary or context), or `out` is
    not beside the old run.
    """
    parent = Run(path)
    here, there = Path(out).resolve(), parent.path.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UsageError(f"--out: {out} is not beside {path}, which is forked and stays as it is; choose another --out")
    saved = parent.load(at)
    old = parent.config
    changes = dict(changes)
    if "seed" in changes and "data_seed" not in changes and old.seeds.data_seed == old.seeds.seed:
        changes["data_seed"] = changes["seed"]
    if changes.get("objective", old.tune.objective) != old.tune.objective:
        changes = {"beta": None, "gamma": None} | changes  # each objective has its own default
    config = old.replace(**changes).resolve()
    fixed = [name for name in FIXED if configs.value(config, name) != configs.value(old, name)]
    fixed += ["depth"] if changes.get("depth") is not None else []  # it is no more once it is resolved
    if fixed:
        what = "adapters" if fixed[0] in configs.TUNE else "shape"
        raise UsageError(f"{configs.flag(fixed[0])}: a fork goes on with the weights of step {at}, and so their {what}")
    if config.seeds.init_seed != old.seeds.init_seed:
        raise UsageError("--init-seed: the initial weights are long past in a fork; train a new run for that")
    if config.optim.steps <= at:
        raise UsageError(f"--steps: the fork is at step {at} already; give more steps than that")
    backend = backends.activate(config.loop.device, config.loop.kernels)
    config = replace(config, loop=replace(config.loop, device=backend.name))
    corpus = open_corpus_of(config)
    if corpus.vocab_size != (has := parent.manifest["corpus"]["vocab"]):
        raise UsageError(f"{path}: the weights have {has} token ids, this text {corpus.vocab_size}")
    past = saved.past
    changed = [[name, *values] for name, *values in configs.differences(old, config, bool(past.detours))]
    if corpus.describe()["digest"] != parent.manifest["corpus"]["digest"]:
        changed.append(["corpus", parent.manifest["corpus"]["digest"], corpus.describe()["digest"]])

    def old_lines(name: str) -> list[dict[str, Any]]:
        branch = (r for r in parent.records(name, branches=True) if r.get("detour", 0) <= len(past.detours))
        return [r for r in timeline(branch) if r["step"] <= at]

    tokens = next((r.get("tokens", 0) for r in old_lines(METRICS) if r["step"] == at), None)
    if tokens is None:
        raise UsageError(f"{parent.path / METRICS}: has no line of step {at}")
    origin = {
        "forked": {"run": str(parent.path), "recipe": parent.recipe, "step": at, "tokens": tokens, "changed": changed}
    }
    frozen = None
    if parent.base is not None:
        origin["base"] = parent.manifest["base"]
        frozen = base.load(parent)

    def begin(run: Run) -> None:
        if frozen is not None:
            base.publish(run, frozen)
        logs = {name: old_lines(name) for name in (METRICS, VALIDATION)}
        # The state has been through the old run's rollbacks, and what reads the log has to know.
        logs[EVENTS] = [{"event": "rollback", "step": d.step, "to": d.to, "detour": n, "inherited": True}
                        for n, d in enumerate(past.detours, 1)]  # fmt: skip
        for name, records in logs.items():
            with checkpoint.saving(str(run.path / name), "the run that is forked is untouched"):
                (run.path / name).write_text("".join(line(r) + "\n" for r in records))
        checkpoint.save(run.checkpoints, saved, run.recipe)

    return start(config, corpus, backend, Path(out), origin, overwrite, listener or Quiet(), begin)
