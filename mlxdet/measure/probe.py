"""Loss and gradient norm of any rows in any state, judged against what is usual there.

One observation is compared with many: as a step of the log with the steps before it, so here a batch with other batches
in the same state, by the rule of training/spikes.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet.data.batches import Batch
from mlxdet.model import gpt
from mlxdet.training.detours import detour_at
from mlxdet.training.spikes import Detector, Limits
from mlxdet.training.step import State, TrainStep, tree_sum

# A log is searched step by step, so its threshold is 6 deviations; here one step is asked about, and half is enough.
CONFIRM = 3.0


class Probe(TrainStep):
    """The training step's loss and gradient with a weight on each row: 0 leaves a row out, masks and noise unmoved."""

    def loss(
        self,
        weights: gpt.Weights,
        e: mx.array,
        targets: mx.array,
        drop: mx.array | None,
        noise: mx.array | None,
        rows: mx.array | None = None,
    ) -> mx.array:
        """Return the summed loss of the rows, `rows` float32 (B,) being their weights."""
        losses = self.token_losses(weights, e, targets, drop, noise)
        return losses.sum() if rows is None else (losses * rows[:, None]).sum()

    def measure(self, state: State, batch: Batch, left_out: Sequence[int] = ()) -> tuple[float, float]:
        """Return mean loss per token and gradient norm of `batch` without the rows `left_out`, as of its step.

        A row that is left out also gets the text of one that stays, so that nothing it holds can reach the rest.
        """
        count, size, length = math.prod(batch.tokens.shape[:2]), *batch.tokens.shape[1:]
        kept = np.ones(count, np.float32)
        kept[list(left_out)] = 0.0
        tokens = batch.tokens.reshape(count, length).copy()
        tokens[kept == 0.0] = tokens[int(np.argmax(kept))]
        detour = detour_at(state.past.detours, batch.step)
        parts = (
            self._gradient(
                state.weights,
                mx.array(tokens[i * size : (i + 1) * size]),
                [*self.keys(batch.step, i, detour), mx.array(kept[i * size : (i + 1) * size])],
            )
            for i in range(count // size)
        )
        loss, grads = tree_sum(parts, self._add)
        norm = mx.sqrt(mx.stack([mx.square(grads[k]).sum() for k in sorted(grads)]).sum())
        scored = int(kept.sum()) * (length - 1)
        a: Any = loss.item()
        b: Any = norm.item()
        return a / scored, b / scored


@dataclass(frozen=True)
class Figure:
    """Loss and gradient norm, and how many robust deviations each stands above the level it was judged by.

    `reason`: why it is a spike by `factor`, None if it is not; deviations are None where there is no level.
    """

    loss: float
    grad_norm: float
    loss_deviations: float | None
    norm_deviations: float | None
    reason: str | None

    @property
    def badness(self) -> float:
        """Return the larger of the two deviations, infinite for what is not finite."""
        if not (math.isfinite(self.loss) and math.isfinite(self.grad_norm)):
            return math.inf
        return max((d for d in (self.loss_deviations, self.norm_deviations) if d is not None), default=0.0)


def judged(limits: Limits, loss: float, grad_norm: float, factor: float | None = None) -> Figure:
    """Return a figure, a spike where `limits` (with another factor, if given) say so."""
    limits = limits if factor is None else replace(limits, factor=factor)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return Figure(
        loss,
        grad_norm,
        limits.loss.deviations(loss) if limits.loss and finite else None,
        limits.log_norm.deviations(math.log(max(grad_norm, 1e-38))) if limits.log_norm and finite else None,
        limits.judge(loss, grad_norm),
    )


@dataclass(frozen=True)
class Place:
    """A batch and other batches in one state.

    `typical`: the medians of the others, judged by the run's log. `batch`: the batch, judged by the others. `in_log`:
    the batch, judged by the run's log.
    """

    name: str
    step: int  # steps trained
    typical: Figure
    batch: Figure
    in_log: Figure
    as_bad: int  # others whose loss and norm both reach the batch's
    others: int

    def as_dict(self) -> dict[str, Any]:
        keys = ("name", "step", "as_bad", "others")
        return {k: getattr(self, k) for k in keys} | {k: vars(getattr(self, k)) for k in ("typical", "batch", "in_log")}


def compare_in(probe: Probe, name: str, state: State, batch: Batch, others: Sequence[Batch], log: Limits) -> Place:
    """Measure `batch` and `others` (of the same step) in `state`; `log`: the levels of the run's own log."""
    measured = [probe.measure(state, other) for other in others]
    here = Detector.after({"step": i, "loss": a, "grad_norm": b} for i, (a, b) in enumerate(measured)).limits()
    loss, norm = probe.measure(state, batch)
    return Place(
        name,
        state.step,
        judged(log, _median(a for a, _ in measured), _median(b for _, b in measured), CONFIRM),
        judged(here, loss, norm, CONFIRM),
        judged(log, loss, norm),
        sum(not (a < loss) and not (b < norm) for a, b in measured),
        len(others),
    )


def _median(values: Iterable[float]) -> float:
    ordered = sorted(math.inf if math.isnan(v) else v for v in values)
    return ordered[len(ordered) // 2]


@dataclass(frozen=True)
class Without:
    """The step without some rows, judged by the run's log."""

    rows: tuple[int, ...]
    figure: Figure


def leave_out(probe: Probe, state: State, batch: Batch, log: Limits, groups: int = 32) -> list[Without]:
    """Return the step without each row, the most telling first; with more than `groups` rows, group by group.

    Then the group that matters most is searched the same way, so R rows cost about groups * log(R) steps.
    """
    candidates = list(range(math.prod(batch.tokens.shape[:2])))
    found: list[Without] = []
    if len(candidates) == 1:
        return found
    while True:
        size = -(-len(candidates) // groups)
        parts = [tuple(candidates[i : i + size]) for i in range(0, len(candidates), size)]
        tried = [Without(part, judged(log, *probe.measure(state, batch, part))) for part in parts]
        tried.sort(key=lambda w: (w.figure.badness, w.figure.loss))
        if size == 1:
            return tried + found
        found = tried + found
        candidates = list(tried[0].rows)
