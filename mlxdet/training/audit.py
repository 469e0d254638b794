"""The audit of the trainer's own step, for any device, on any machine."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet import config as configs
from mlxdet.auditing.audit import audit_targets
from mlxdet.auditing.report import Audit
from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch
from mlxdet.data.packing import RecordBatch
from mlxdet.errors import Fault
from mlxdet.model import gpt
from mlxdet.training.states import trained_shapes
from mlxdet.training.step import State, TrainStep


def audit_step(config: TrainConfig, vocab: int, target: str, kernels: str | None = None) -> Audit:
    """Return the audit of one step of a resolved config with `vocab` token ids, as it is built for `target`.

    No weight is allocated. Of the micro-batches two are traced at most: each runs the same compiled function, and the
    second brings the addition of their gradients. `kernels`: other than the config's, "deterministic" or "default".
    """
    config = config.replace(kernels=kernels) if kernels is not None else config
    step = TrainStep(config, vocab, Backend(target, config.loop.kernels))
    assert config.model.context
    shape = (min(config.optim.accumulation, 2), config.optim.batch, config.model.context + 1)

    none = np.zeros(0, np.int64)

    def run(weights: gpt.Weights, first: gpt.Weights, second: gpt.Weights, tokens: Any) -> Any:
        return step(State(weights, first, second, 0), Batch(1, tokens, none, ""))

    shapes = trained_shapes(config, vocab)
    trees = [{name: mx.zeros(s, mx.float32) for name, s in shapes.items()} for _ in range(3)]  # lazy: never made
    if not configs.tuned(config):
        return audit_targets(run, (*trees, mx.zeros(shape, mx.int32)), {}, (target,))[target]

    groups, lines, width = shape[0], shape[1] * (2 if step.objective.pairs else 1), config.model.context
    counted = np.ones((groups, lines, width), bool)  # the number of scored tokens is the host's

    def tuned(weights: Any, first: Any, second: Any, base: Any, tokens: Any, more: dict[str, Any]) -> Any:
        state = State(weights, first, second, 0, base=base)
        if config.tune.objective == "lm":
            return step(state, Batch(1, tokens, none, ""))
        more = {"positions": None, "segments": None, **more}
        total = step.begin(state, RecordBatch(1, tokens, rows=none, spans=none, digest="", **more))
        host = np.zeros((groups, lines, width + 1), np.int32)
        return step.finish(state, RecordBatch(1, host, counted, None, None, none, none, ""), total)

    base = gpt.shapes(config.model, vocab) if config.tune.lora_rank else {}
    more = {"scored": mx.ones(counted.shape, mx.bool_)}
    if config.data.packing:
        more |= {name: mx.zeros(counted.shape, mx.int32) for name in ("positions", "segments")}
    if step.objective.reference:
        more["reference"] = mx.zeros((groups, lines), mx.float32)
    frozen = {name: mx.zeros(s, mx.float32) for name, s in base.items()}
    tokens = mx.zeros((groups, lines, width + 1), mx.int32)
    return audit_targets(tuned, (*trees, frozen, tokens, more), {}, (target,))[target]


def audit_for_start(config: TrainConfig, vocab: int, backend: Backend) -> dict[str, Any]:
    """Return the audit of the step that is about to train, for the manifest.

    Raises Fault if the kernels are meant to be deterministic and an operation can race or could not be judged.
    """
    result = audit_step(config, vocab, backend.name, backend.kernels)
    if not result.ok and backend.kernels == "deterministic":
        odd = [f"{f.primitive} ({f.where or f.line}): {f.detail}" for f in result.findings]
        odd += [f"{n.what}: {n.why}" for n in result.not_audited]
        raise Fault(
            f"the step can give different bits on {backend.name}: {'; '.join(odd)}. `mlxdet audit` shows more; "
            f"--kernels default trains all the same"
        )
    return result.as_dict()
