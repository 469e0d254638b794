"""One training step as a pure function: (state, batch) -> (state', loss, gradient norm).

Three compiled pieces, the same whatever the accumulation: the gradient of the summed loss of one micro-batch, the sum
of two gradients, and the update. Micro-batches are summed in a fixed binary tree over their index, so that a step cut
into 1, 2, 4 ... groups of workers can give the same bits, and the sum is divided by the number of scored tokens once.

The embedding lookup is outside autograd: value_and_grad runs by the weights and by the looked-up rows, and the rows'
gradient is added to the table by `segment_sum`, without float atomics. `kernels="default"` leaves the lookup to
autograd, as MLX users usually do: the control arm.

Nothing is drawn from a global generator: dropout and noise take keys made of (seed, name, step, micro-batch).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch
from mlxdet.model import gpt
from mlxdet.model.embedding import segment_sum
from mlxdet.model.ops import ops_for
from mlxdet.seeds import stream
from mlxdet.training.checkpoint import Snapshot
from mlxdet.training.detours import FRESH, Past, detour_at
from mlxdet.training.schedule import learning_rate

NO_LIMITS = (math.inf,) * 4
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class State:
    """All that a step reads and returns: weights, AdamW's two moments (float32, same names), steps done, and the past
    that the next ones depend on."""

    weights: dict[str, mx.array]
    first: dict[str, mx.array]
    second: dict[str, mx.array]
    step: int
    past: Past = FRESH

    @staticmethod
    def of(saved: Snapshot) -> "State":
        """Return a snapshot's state on the device."""
        weights, first, second = (
            {k: mx.array(v) for k, v in tree.items()} for tree in (saved.weights, saved.first, saved.second)
        )
        return State(weights, first, second, saved.step, saved.past)

    def snapshot(self) -> Snapshot:
        """Return the state on the host; waits for it."""
        weights, first, second = (
            {k: np.array(v) for k, v in tree.items()} for tree in (self.weights, self.first, self.second)
        )
        return Snapshot(weights, first, second, self.step, self.past)

    def arrays(self) -> list[mx.array]:
        """Return every array, for mx.eval."""
        return [*self.weights.values(), *self.first.values(), *self.second.values()]


@dataclass(frozen=True)
class Outcome:
    """What one step measured, still lazy: float32 scalars; `applied` says whether the update was made."""

    loss: mx.array
    grad_norm: mx.array
    applied: mx.array


def initial_state(config: TrainConfig, vocab: int) -> State:
    """Return the state before step 1. `config` is resolved."""
    assert config.seeds.init_seed is not None
    weights = {k: mx.array(v) for k, v in gpt.init(config.model, vocab, config.seeds.init_seed).items()}
    return State(weights, _zeros(weights), _zeros(weights), 0)


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
        self.method = backend.embedding_method(vocab, config.optim.batch * config.model.context)
        self._noise = config.model.neftune_alpha / (config.model.context * config.model.width) ** 0.5
        self._gradient = mx.compile(self.gradient)
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
    ) -> mx.array:
        """Return the loss of each token, float32 (B, T); `watch` as in gpt.hidden_from."""
        if noise is not None:
            # NEFTune (Jain et al., arXiv:2310.05914): uniform noise of size alpha / sqrt(T * D).
            e = e + (mx.random.uniform(-1.0, 1.0, e.shape, mx.float32, noise) * self._noise).astype(e.dtype)
        h, _ = gpt.hidden_from(weights, e, self.config.model, self.ops, [], drop, watch)
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

    def update(
        self,
        weights: gpt.Weights,
        first: gpt.Weights,
        second: gpt.Weights,
        total: tuple[mx.array, gpt.Weights],
        scalars: mx.array,
    ) -> tuple[gpt.Weights, gpt.Weights, gpt.Weights, mx.array, mx.array, mx.array]:
        """Return (weights, first, second, loss, gradient norm, applied) after AdamW with clipping.

        AdamW as in Loshchilov and Hutter, arXiv:1711.05101: decoupled decay (matrices only), both moments
        bias-corrected. `scalars`, float32: 1 / scored tokens, learning rate, 1 / (1 - beta1**t), 1 / (1 - beta2**t),
        and the least loss, the least norm, and the least of both together that withhold the update, as what is not
        finite does: weights and moments then stay as they were.
        """
        o = self.config.optim
        per_token, lr, correct1, correct2 = scalars[0], scalars[1], scalars[2], scalars[3]
        names = sorted(weights)
        loss = total[0] * per_token
        grads = {k: total[1][k] * per_token for k in names}
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
        return (*new, loss, norm, applied)

    def keys(self, step: int, micro: int, detour: int = 0) -> list[mx.array | None]:
        """Return the keys of dropout and noise, None where off."""
        seed, m = self.config.seeds.seed, self.config.model
        counters = (step, micro, detour) if detour else (step, micro)
        return [
            random_key(seed, "dropout", *counters) if m.dropout > 0 else None,
            random_key(seed, "neftune", *counters) if m.neftune_alpha > 0 else None,
        ]

    def __call__(self, state: State, batch: Batch) -> tuple[State, Outcome]:
        """Return the next state and what was measured, lazily. `batch.step` must be state.step + 1."""
        return self.finish(state, batch, self.begin(state, batch))

    def begin(self, state: State, batch: Batch) -> tuple[mx.array, gpt.Weights]:
        """Return the summed loss and gradients of a step, lazily: what needs no decision about the step before."""
        assert batch.step == state.step + 1, (batch.step, state.step)
        detour = detour_at(state.past.detours, batch.step)
        parts = (
            self._gradient(state.weights, mx.array(tokens), self.keys(batch.step, micro, detour))
            for micro, tokens in enumerate(batch.tokens)
        )
        return tree_sum(parts, self._add)

    def finish(
        self, state: State, batch: Batch, total: tuple[mx.array, gpt.Weights], limits: Sequence[float] = NO_LIMITS
    ) -> tuple[State, Outcome]:
        """Return the next state and what was measured, lazily. `limits`: see `update`; from `spikes.Limits.thresholds`.

        AdamW's t counts the updates that were made, not the steps: a withheld one has left the moments as they were.
        """
        o, step = self.config.optim, batch.step
        t = step - state.past.skipped
        scored = batch.tokens.shape[0] * batch.tokens.shape[1] * (batch.tokens.shape[2] - 1)
        scalars = np.array(
            [
                1.0 / scored,
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
        return State(weights, first, second, step, state.past), Outcome(*measured)


def _float32_up(value: float) -> np.float32:
    """Return the least float32 not below `value`: for a float32 x, x >= it is exactly x >= value."""
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
    return nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf))


def _add(a: tuple[mx.array, gpt.Weights], b: tuple[mx.array, gpt.Weights]) -> tuple[mx.array, gpt.Weights]:
    return a[0] + b[0], {k: a[1][k] + b[1][k] for k in a[1]}
