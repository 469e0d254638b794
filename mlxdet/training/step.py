"""One training step as a pure function: (state, batch) -> (state', loss, gradient norm, other measures).

Three compiled pieces, the same whatever the accumulation: the gradient of the summed loss of one micro-batch, the sum
of two gradients, and the update. Micro-batches are summed in a fixed binary tree over their index, so that a step cut
into 1, 2, 4 ... groups of workers can give the same bits, and the sum is divided by the number of scored tokens once.

The embedding lookup is outside autograd: value_and_grad runs by the weights and by the looked-up rows, and the rows'
gradient is added to the table by `segment_sum`, without float atomics. `kernels="default"` leaves the lookup to
autograd, as MLX users usually do: the control arm. With LoRA the embedding is frozen and has no gradient at all.

Nothing is drawn from a global generator: dropout and noise take keys made of (seed, name, step, micro-batch).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch
from mlxdet.data.packing import RecordBatch
from mlxdet.model import gpt, lora
from mlxdet.model.embedding import segment_sum
from mlxdet.model.ops import ops_for
from mlxdet.seeds import stream
from mlxdet.training.checkpoint import Snapshot
from mlxdet.training.detours import FRESH, Past, detour_at
from mlxdet.training.objectives import OBJECTIVES
from mlxdet.training.schedule import learning_rate
from mlxdet.tuning import lora_scale

NO_LIMITS = (math.inf,) * 4
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class State:
    """All that a step reads and returns: weights, AdamW's two moments (float32, same names), steps done, and the past
    that the next ones depend on. Where adapters are trained, `weights` are they, and `base` is frozen under them."""

    weights: dict[str, mx.array]
    first: dict[str, mx.array]
    second: dict[str, mx.array]
    step: int
    past: Past = FRESH
    base: dict[str, mx.array] = field(default_factory=dict)

    @staticmethod
    def of(saved: Snapshot, base: dict[str, mx.array] | None = None) -> "State":
        """Return a snapshot's state on the device, over the frozen `base` if it is one of adapters."""
        weights, first, second = (
            {k: mx.array(v) for k, v in tree.items()} for tree in (saved.weights, saved.first, saved.second)
        )
        return State(weights, first, second, saved.step, saved.past, base or {})

    def snapshot(self) -> Snapshot:
        """Return the state on the host, without the base; waits for it."""
        weights, first, second = (
            {k: np.array(v) for k, v in tree.items()} for tree in (self.weights, self.first, self.second)
        )
        return Snapshot(weights, first, second, self.step, self.past)

    def arrays(self) -> list[mx.array]:
        """Return every array that a step makes, for mx.eval."""
        return [*self.weights.values(), *self.first.values(), *self.second.values()]


@dataclass(frozen=True)
class Outcome:
    """What one step measured, still lazy: float32 scalars; `applied` says whether the update was made.

    `measures`: the means of the objective's measures, float32 (m,), the loss first; None for a new model on text.
    """

    loss: mx.array
    grad_norm: mx.array
    applied: mx.array
    measures: mx.array | None = None


def initial_state(config: TrainConfig, vocab: int) -> State:
    """Return the state before step 1. `config` is resolved."""
    assert config.seeds.init_seed is not None
    return fresh_state({k: mx.array(v) for k, v in gpt.init(config.model, vocab, config.seeds.init_seed).items()})


def fresh_state(weights: dict[str, mx.array], base: dict[str, mx.array] | None = None) -> State:
    """Return the state before step 1 of `weights`, over the frozen `base` if they are adapters."""
    return State(weights, _zeros(weights), _zeros(weights), 0, FRESH, base or {})


def _zeros(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {k: mx.zeros(w.shape, mx.float32) for k, w in weights.items()}


def random_key(seed: int, name: str, *counters: int) -> mx.array:
    """Return an MLX key (uint32, (2,)) of the named stream, built from all 64 bits."""
    key = stream(seed, name, *counters)
    return mx.array(np.array([key >> 32, key & 0xFFFFFFFF], np.uint32))


def tree_sum(parts: Iterable[Any], add: Any) -> Any:
    """Return the sum of `parts` in a binary tree over their index, holding log2 of them: ((0+1)+(2+3))+(4+5)..."""
    pending: list[tuple[int, Any]] = []  # (level, partial sum), levels falling: a binary counter
    for part in parts:
        level, total = 0, part
        while pending and pending[-1][0] == level:
            total, level = add(pending.pop()[1], total), level + 1
        pending.append((level, total))
    total = pending.pop()[1]
    while pending:
        total = add(pending.pop()[1], total)
    return total


class TrainStep:
    """The compiled step of one config on one backend. Call it with a state and a batch; it keeps nothing of either."""

    def __init__(self, config: TrainConfig, vocab: int, backend: Backend):
        """`config` is resolved; `vocab` is the number of token ids."""
        self.config, self.vocab = config, vocab
        self.ops, self.dtype = ops_for(backend), DTYPES[config.model.dtype]
        assert config.model.context and config.model.width
        self.objective = OBJECTIVES[config.tune.objective]
        self.scale = lora_scale(config) if config.tune.lora_rank else 0.0
        ids = config.optim.batch * config.model.context * (2 if self.objective.pairs else 1)
        self.method = backend.embedding_method(vocab, ids)
        self._position_method = backend.embedding_method(config.model.context, ids)
        # A new model on text keeps the graph, and so the bits, that it always had.
        self._measured = config.tune.objective != "lm" or config.tune.lora_rank > 0
        self._noise = config.model.neftune_alpha / (config.model.context * config.model.width) ** 0.5
        self._gradient = mx.compile(self.gradient)
        self._measured_gradient = mx.compile(self.measured_gradient)
        self._add = mx.compile(_add)
        self._update = mx.compile(self.update)

    def loss(
        self, weights: gpt.Weights, e: mx.array, targets: mx.array, drop: mx.array | None, noise: mx.array | None
    ) -> mx.array:
        """Return the summed loss (float32) of token embeddings e (B, T, D) against targets (B, T)."""
        return self.token_losses(weights, e, targets, drop, noise).sum()

    def token_losses(
        self,
        weights: gpt.Weights,
        e: mx.array,
        targets: mx.array,
        drop: mx.array | None,
        noise: mx.array | None,
        watch: list[mx.array] | None = None,
        segments: mx.array | None = None,
    ) -> mx.array:
        """Return the loss of each token, float32 (B, T); `watch` and `segments` as in gpt.hidden_from."""
        if noise is not None:
            # NEFTune (Jain et al., arXiv:2310.05914): uniform noise of size alpha / sqrt(T * D).
            e = e + (mx.random.uniform(-1.0, 1.0, e.shape, mx.float32, noise) * self._noise).astype(e.dtype)
        h, _ = gpt.hidden_from(
            weights, e, self.config.model, self.ops, [], drop, watch, segments=segments,
            lora_dropout=self.config.tune.lora_dropout,
        )  # fmt: skip
        return self.ops.cross_entropy(gpt.logits(weights, h), targets)

    def gradient(
        self, weights: gpt.Weights, tokens: mx.array, keys: list[mx.array | None]
    ) -> tuple[mx.array, gpt.Weights]:
        """Return (summed loss, float32 gradients by name) of one micro-batch, tokens int32 (B, T+1)."""
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        if self.config.loop.kernels == "default":
            return mx.value_and_grad(lambda w: self.loss(w, gpt.embed(w, ids, self.dtype), targets, *keys))(weights)
        e = gpt.embed(weights, ids, self.dtype)
        loss, (grads, rows) = mx.value_and_grad(self.loss, argnums=(0, 1))(weights, e, targets, *keys)
        grads[gpt.TOKENS] = grads[gpt.TOKENS] + segment_sum(self.method, ids, rows, self.vocab)
        return loss, grads

    def measured_gradient(
        self,
        weights: gpt.Weights,
        base: gpt.Weights,
        tokens: mx.array,
        extra: dict[str, mx.array],
        keys: list[mx.array | None],
    ) -> tuple[mx.array, gpt.Weights]:
        """As `gradient`, with the sums of all measures of the objective, float32 (m,), the loss first.

        `base`: empty, or the frozen weights under the adapters `weights`. `extra`: "scored" bool (B, T), and where
        there are any "positions" and "segments", int32 (B, T), and "reference", float32 (B,), as in RecordBatch.
        """
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        positions, t = extra.get("positions"), self.config.tune
        drop, noise = keys

        def sums(weights: gpt.Weights, e: mx.array | None) -> tuple[mx.array, mx.array]:
            model = self.joined(weights, base)
            e = gpt.embed(model, ids, self.dtype, positions) if e is None else e
            losses = self.token_losses(model, e, targets, drop, noise, segments=extra.get("segments"))
            measured = self.objective.sums(-losses, extra["scored"], extra.get("reference"), t.beta, t.gamma)
            return measured[0], measured

        if base:
            e = gpt.embed(base, ids, self.dtype, positions)
            (_, measured), grads = mx.value_and_grad(lambda w: sums(w, e))(weights)
        elif self.config.loop.kernels == "default":
            (_, measured), grads = mx.value_and_grad(lambda w: sums(w, None))(weights)
        else:
            e = gpt.embed(weights, ids, self.dtype, positions)
            (_, measured), (grads, rows) = mx.value_and_grad(sums, argnums=(0, 1))(weights, e)
            grads[gpt.TOKENS] = grads[gpt.TOKENS] + segment_sum(self.method, ids, rows, self.vocab)
            if positions is not None:  # looked up outside autograd as well, which gave a gradient of zero
                context = weights[gpt.POSITIONS].shape[0]
                grads[gpt.POSITIONS] = segment_sum(self._position_method, positions, rows, context)
        return measured, grads

    def joined(self, weights: gpt.Weights, base: gpt.Weights) -> gpt.Weights:
        """Return the weights as the model takes them: adapters `weights` over `base`, or `weights` if that is empty."""
        return lora.joined(base, weights, self.scale) if base else weights

    def model(self, state: State) -> gpt.Weights:
        """Return the model of a state: what generates and is evaluated."""
        return self.joined(state.weights, state.base)

    def update(
        self,
        weights: gpt.Weights,
        first: gpt.Weights,
        second: gpt.Weights,
        total: tuple[mx.array, gpt.Weights],
        scalars: mx.array,
    ) -> tuple[Any, ...]:
        """Return (weights, first, second, loss, gradient norm, applied) after AdamW with clipping, and the means of the
        measures where they are more than the loss.

        AdamW as in Loshchilov and Hutter, arXiv:1711.05101: decoupled decay (matrices only), both moments
        bias-corrected. `scalars`, float32: 1 / scored tokens (or pairs), learning rate, 1 / (1 - beta1**t),
        1 / (1 - beta2**t), and the least loss, the least norm, and the least of both together that withhold the update,
        as what is not finite does: weights and moments then stay as they were.
        """
        o = self.config.optim
        per_unit, lr, correct1, correct2 = scalars[0], scalars[1], scalars[2], scalars[3]
        names = sorted(weights)
        measures = total[0] * per_unit
        loss = measures[0] if self._measured else measures
        grads = {k: total[1][k] * per_unit for k in names}
        norm = mx.sqrt(mx.stack([mx.square(grads[k]).sum() for k in names]).sum())
        spike = (loss >= scalars[4]) | (norm >= scalars[5]) | ((loss >= scalars[6]) & (norm >= scalars[7]))
        applied = mx.isfinite(loss) & mx.isfinite(norm) & ~spike
        scale = mx.minimum(o.grad_clip / (norm + 1e-6), 1.0) if o.grad_clip > 0 else mx.array(1.0)
        new: tuple[gpt.Weights, gpt.Weights, gpt.Weights] = ({}, {}, {})
        for k in names:
            g = grads[k] * scale
            m = first[k] * o.beta1 + g * (1.0 - o.beta1)
            v = second[k] * o.beta2 + g * g * (1.0 - o.beta2)
            w = weights[k] * (1.0 - lr * o.weight_decay) if weights[k].ndim > 1 else weights[k]
            w = w - lr * (m * correct1) / (mx.sqrt(v * correct2) + o.eps)
            for out, value, old in zip(new, (w, m, v), (weights[k], first[k], second[k]), strict=True):
                out[k] = mx.where(applied, value, old)
        return (*new, loss, norm, applied, *([measures] if self._measured else []))

    def keys(self, step: int, micro: int, detour: int = 0) -> list[mx.array | None]:
        """Return the keys of dropout and noise, None where off."""
        seed, m = self.config.seeds.seed, self.config.model
        drops = m.dropout > 0 or self.config.tune.lora_dropout > 0
        counters = (step, micro, detour) if detour else (step, micro)
        return [
            random_key(seed, "dropout", *counters) if drops else None,
            random_key(seed, "neftune", *counters) if m.neftune_alpha > 0 else None,
        ]

    def __call__(self, state: State, batch: Batch | RecordBatch) -> tuple[State, Outcome]:
        """Return the next state and what was measured, lazily. `batch.step` must be state.step + 1."""
        return self.finish(state, batch, self.begin(state, batch))

    def begin(self, state: State, batch: Batch | RecordBatch) -> tuple[mx.array, gpt.Weights]:
        """Return the summed loss and gradients of a step, lazily: what needs no decision about the step before."""
        assert batch.step == state.step + 1, (batch.step, state.step)
        detour = detour_at(state.past.detours, batch.step)
        return tree_sum((self._micro(state, batch, i, detour) for i in range(batch.tokens.shape[0])), self._add)

    def _micro(self, state: State, batch: Batch | RecordBatch, micro: int, detour: int) -> tuple[mx.array, gpt.Weights]:
        tokens, keys = mx.array(batch.tokens[micro]), self.keys(batch.step, micro, detour)
        if not self._measured:
            return self._gradient(state.weights, tokens, keys)
        return self._measured_gradient(state.weights, state.base, tokens, self.extra(batch, micro), keys)

    def extra(self, batch: Batch | RecordBatch, micro: int) -> dict[str, mx.array]:
        """Return what a micro-batch has beside its tokens, by name; see `measured_gradient`."""
        if not isinstance(batch, RecordBatch):
            return {"scored": mx.ones((batch.tokens.shape[1], batch.tokens.shape[2] - 1), mx.bool_)}
        named = {"scored": batch.scored, "positions": batch.positions, "segments": batch.segments,
                 "reference": batch.reference}  # fmt: skip
        return {name: mx.array(whole[micro]) for name, whole in named.items() if whole is not None}

    def units(self, batch: Batch | RecordBatch) -> int:
        """Return what the sums of a batch are divided by: its scored tokens, or its pairs."""
        size = batch.tokens.shape
        if not isinstance(batch, RecordBatch):
            return size[0] * size[1] * (size[2] - 1)
        return size[0] * size[1] // 2 if self.objective.pairs else int(np.count_nonzero(batch.scored))

    def finish(
        self,
        state: State,
        batch: Batch | RecordBatch,
        total: tuple[mx.array, gpt.Weights],
        limits: Sequence[float] = NO_LIMITS,
    ) -> tuple[State, Outcome]:
        """Return the next state and what was measured, lazily. `limits`: see `update`; from `spikes.Limits.thresholds`.

        AdamW's t counts the updates that were made, not the steps: a withheld one has left the moments as they were.
        """
        o, step = self.config.optim, batch.step
        t = step - state.past.skipped
        scalars = np.array(
            [
                1.0 / self.units(batch),
                learning_rate(o, step, state.past.detours),
                1.0 / (1.0 - o.beta1**t),
                1.0 / (1.0 - o.beta2**t),
                *(_float32_up(limit) for limit in limits),
            ],
            np.float32,
        )
        weights, first, second, *measured = self._update(
            state.weights, state.first, state.second, total, mx.array(scalars)
        )
        return State(weights, first, second, step, state.past, state.base), Outcome(*measured)


def _float32_up(value: float) -> np.float32:
    """Return the least float32 not below `value`: for a float32 x, x >= it is exactly x >= value."""
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
    return nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf))


def _add(a: tuple[mx.array, gpt.Weights], b: tuple[mx.array, gpt.Weights]) -> tuple[mx.array, gpt.Weights]:
    return a[0] + b[0], {k: a[1][k] + b[1][k] for k in a[1]}
