"""What one step of a training looks like inside: rows, tokens, layers and tensors.

All of it is computed beside the step, from the state before it and its batch, with the step's own dropout masks and
noise: looking changes no bit of the training. Norms are added up in float64 on the host.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet.data.batches import Batch
from mlxdet.data.text import Corpus
from mlxdet.model import gpt
from mlxdet.training.detours import detour_at
from mlxdet.training.schedule import learning_rate
from mlxdet.training.step import State, TrainStep

CONTEXT = 32  # tokens shown before a bad one
WORST = 20


@dataclass(frozen=True)
class StepTrace:
    """What was measured at one step.

    `token_losses`: float32 (rows, context), the loss of each target. `layers`: from the embedding to the head, with the
    RMS and the largest absolute value of what leaves them; `tensors`: weights by name. Both have the norms of gradient
    (as logged, before clipping), weights, moments after the step, and ||update|| / ||weight||.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    clip: float  # what the gradient was multiplied by
    token_losses: np.ndarray
    layers: list[dict[str, Any]]
    tensors: list[dict[str, Any]]


def trace_step(step_fn: TrainStep, state: State, batch: Batch) -> StepTrace:
    """Measure the step that `batch` trains from `state`."""
    total = step_fn.begin(state, batch)
    after, outcome = step_fn.finish(state, batch, total)
    tokens = batch.tokens.shape[0] * batch.tokens.shape[1] * (batch.tokens.shape[2] - 1)
    losses, streams = _forward(step_fn, state, batch)
    o = step_fn.config.optim
    loss: Any = outcome.loss.item()
    norm: Any = outcome.grad_norm.item()
    tensors = [_tensor(k, state, after, total[1][k], tokens) for k in sorted(state.weights)]
    return StepTrace(
        batch.step,
        loss,
        norm,
        learning_rate(o, batch.step, state.past.detours),
        min(o.grad_clip / (norm + 1e-6), 1.0) if o.grad_clip > 0 else 1.0,
        losses,
        _layers(streams, tensors),
        tensors,
    )


def _forward(step_fn: TrainStep, state: State, batch: Batch) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Return the loss of each token, and RMS and largest absolute value of what leaves each layer."""
    detour = detour_at(state.past.detours, batch.step)
    losses: list[np.ndarray] = []
    squares: dict[str, float] = {}
    largest: dict[str, float] = {}
    counts: dict[str, int] = {}
    for micro, tokens in enumerate(batch.tokens):
        ids, targets = mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])
        watch: list[mx.array] = []
        drop, noise = step_fn.keys(batch.step, micro, detour)
        e = gpt.embed(state.weights, ids, step_fn.dtype)
        losses.append(np.array(step_fn.token_losses(state.weights, e, targets, drop, noise, watch)))
        layers = ["embedding", *(f"blocks.{i}" for i in range(len(watch) - 2)), "norm", "head"]
        for name, x in zip(layers, [*watch, gpt.logits(state.weights, watch[-1])], strict=True):
            host = np.array(x.astype(mx.float32)).astype(np.float64)
            squares[name] = squares.get(name, 0.0) + float(np.square(host).sum())
            largest[name] = max(largest.get(name, 0.0), _largest(host))
            counts[name] = counts.get(name, 0) + host.size
    return np.concatenate(losses), {k: (math.sqrt(squares[k] / counts[k]), largest[k]) for k in squares}


def _largest(x: np.ndarray) -> float:
    return math.inf if not np.isfinite(x).all() else float(np.abs(x).max())


def _tensor(name: str, before: State, after: State, grad: mx.array, tokens: int) -> dict[str, Any]:
    old, new, g, m, v = (
        np.array(x, np.float64) for x in (before.weights[name], after.weights[name], grad, after.first[name],
                                         after.second[name])
    )  # fmt: skip
    g = g / tokens
    return {
        "name": name,
        "layer": layer_of(name),
        "shape": list(old.shape),
        "grad_norm": _norm(g),
        "grad_max": _largest(g),
        "weight_norm": _norm(old),
        "weight_max": _largest(old),
        "update_norm": _norm(new - old),
        "update_ratio": _ratio(_norm(new - old), _norm(old)),
        "m_norm": _norm(m),
        "v_norm": _norm(v),
    }


def layer_of(name: str) -> str:
    """Return the layer a weight belongs to. The head is the token embedding, so it has no weight of its own."""
    if name in (gpt.TOKENS, gpt.POSITIONS):
        return "embedding"
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "norm"


def _layers(streams: dict[str, tuple[float, float]], tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for layer, (rms, largest) in streams.items():
        row: dict[str, Any] = {"layer": layer, "activation_rms": rms, "activation_max": largest}
        mine = [t for t in tensors if t["layer"] == layer]
        for k in ("grad_norm", "weight_norm", "update_norm", "m_norm", "v_norm"):
            row[k] = _together(t[k] for t in mine) if mine else None
        row["update_ratio"] = _ratio(row["update_norm"], row["weight_norm"]) if mine else None
        table.append(row)
    return table


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).sum()))


def _together(norms: Iterable[float]) -> float:
    return math.sqrt(sum(n * n for n in norms))


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def rows_of(batch: Batch, losses: np.ndarray, corpus: Corpus) -> list[dict[str, Any]]:
    """Return the rows of a batch, the worst first: where they lie, their text, mean loss, and share of the loss."""
    windows = batch.tokens.reshape(-1, batch.tokens.shape[-1])
    sums = losses.astype(np.float64).sum(axis=1)
    total = float(sums.sum())
    table = []
    for i, window in enumerate(windows):
        place = corpus.where(int(batch.rows[i]))
        table.append(
            {"row": i, "micro_batch": i // batch.tokens.shape[1], "token": int(batch.rows[i]), "file": place.file,
             "offset": place.offset, "line": place.line, "loss": float(sums[i]) / losses.shape[1],
             "share": _ratio(float(sums[i]), total), "text": corpus.decode(window)}
        )  # fmt: skip
    return sorted(table, key=lambda r: -_order(r["loss"]))


def worst_tokens(batch: Batch, losses: np.ndarray, corpus: Corpus, count: int = WORST) -> list[dict[str, Any]]:
    """Return the `count` targets with the largest loss, worst first, with the text before them."""
    windows = batch.tokens.reshape(-1, batch.tokens.shape[-1])
    flat = np.where(np.isfinite(losses), losses, np.inf).reshape(-1)
    table = []
    for index in np.argsort(-flat, kind="stable")[:count]:
        row, at = divmod(int(index), losses.shape[1])
        place = corpus.where(int(batch.rows[row]) + at + 1)
        window = windows[row]
        table.append(
            {"row": row, "position": at, "token": int(batch.rows[row]) + at + 1, "file": place.file,
             "offset": place.offset, "line": place.line, "loss": float(losses[row, at]), "id": int(window[at + 1]),
             "target": corpus.decode(window[at + 1 : at + 2]),
             "context": corpus.decode(window[max(0, at + 1 - CONTEXT) : at + 1])}
        )  # fmt: skip
    return table


def _order(x: float) -> float:
    return x if math.isfinite(x) else math.inf
