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

from mlxdet.data.packing import Piece, RecordBatch, pieces
from mlxdet.model import gpt
from mlxdet.training.corpora import AnyBatch, AnyCorpus
from mlxdet.training.detours import detour_at
from mlxdet.training.schedule import learning_rate
from mlxdet.training.step import State, TrainStep

CONTEXT = 32  # tokens shown before a bad one
WORST = 20


@dataclass(frozen=True)
class StepTrace:
    """What was measured at one step.

    `token_losses`: float32 (lines, context), the loss of each target, NaN where it is not scored. `layers`: from the
    embedding to the head, with the RMS and the largest absolute value of what leaves them; `tensors`: trained weights
    by name. Both have the norms of gradient (as logged, before clipping), weights, moments after the step, and
    ||update|| / ||weight||.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    clip: float  # what the gradient was multiplied by
    token_losses: np.ndarray
    layers: list[dict[str, Any]]
    tensors: list[dict[str, Any]]


def trace_step(step_fn: TrainStep, state: State, batch: AnyBatch) -> StepTrace:
    """Measure the step that `batch` trains from `state`."""
    total = step_fn.begin(state, batch)
    after, outcome = step_fn.finish(state, batch, total)
    losses, streams = _forward(step_fn, state, batch)
    o = step_fn.config.optim
    loss: Any = outcome.loss.item()
    norm: Any = outcome.grad_norm.item()
    tensors = [_tensor(k, state, after, total[1][k], step_fn.units(batch)) for k in sorted(state.weights)]
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


def _forward(step_fn: TrainStep, state: State, batch: AnyBatch) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Return the loss of each token, and RMS and largest absolute value of what leaves each layer."""
    detour = detour_at(state.past.detours, batch.step)
    losses: list[np.ndarray] = []
    squares: dict[str, float] = {}
    largest: dict[str, float] = {}
    counts: dict[str, int] = {}
    model = step_fn.model(state)
    for micro, tokens in enumerate(batch.tokens):
        ids, targets = mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])
        watch: list[mx.array] = []
        drop, noise = step_fn.keys(batch.step, micro, detour)
        extra = step_fn.extra(batch, micro)
        e = gpt.embed(model, ids, step_fn.dtype, extra.get("positions"))
        found = step_fn.token_losses(model, e, targets, drop, noise, watch, extra.get("segments"))
        losses.append(np.array(mx.where(extra["scored"], found, math.nan)))
        layers = ["embedding", *(f"blocks.{i}" for i in range(len(watch) - 2)), "norm", "head"]
        for name, x in zip(layers, [*watch, gpt.logits(model, watch[-1])], strict=True):
            host = np.array(x.astype(mx.float32)).astype(np.float64)
            squares[name] = squares.get(name, 0.0) + float(np.square(host).sum())
            largest[name] = max(largest.get(name, 0.0), _largest(host))
            counts[name] = counts.get(name, 0) + host.size
    return np.concatenate(losses), {k: (math.sqrt(squares[k] / counts[k]), largest[k]) for k in squares}


def _largest(x: np.ndarray) -> float:
    return math.inf if not np.isfinite(x).all() else float(np.abs(x).max())


def _tensor(name: str, before: State, after: State, grad: mx.array, units: int) -> dict[str, Any]:
    old, new, g, m, v = (
        np.array(x, np.float64) for x in (before.weights[name], after.weights[name], grad, after.first[name],
                                         after.second[name])
    )  # fmt: skip
    g = g / units
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


def rows_of(batch: AnyBatch, losses: np.ndarray, corpus: AnyCorpus) -> list[dict[str, Any]]:
    """Return the rows of a batch, the worst first: where they lie, their text, mean loss, and share of the loss.

    `losses`: of each target, NaN where it is not scored. A loss that is NaN itself is one of a row without a mean.
    """
    windows = batch.tokens.reshape(-1, batch.tokens.shape[-1])
    scored = _scored(batch)
    found = _pieces(batch)
    sums = [float(losses[p.line][_within(scored, p)].astype(np.float64).sum()) for p in found]
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
    table = []
    for i, (p, loss) in enumerate(zip(found, sums, strict=True)):
        place, count = corpus.where(p.row), int(np.count_nonzero(_within(scored, p)))
        table.append(
            {"row": i, "micro_batch": p.line // batch.tokens.shape[1], "token": p.row, "file": place.file,
             "offset": place.offset, "line": place.line, "loss": loss / max(1, count), "share": _ratio(loss, total),
             "text": corpus.decode(windows[p.line][p.start : p.stop])} | ({"side": p.side} if p.side else {})
        )  # fmt: skip
    return sorted(table, key=lambda r: -_order(r["loss"]))


def _pieces(batch: AnyBatch) -> list[Piece]:
    """Return the rows of a batch where they stand; of text, the windows, `row` being their first token."""
    if isinstance(batch, RecordBatch):
        return pieces(batch)
    return [Piece(int(row), "", i, 0, batch.tokens.shape[-1]) for i, row in enumerate(batch.rows)]


def _scored(batch: AnyBatch) -> np.ndarray:
    """Which targets count, bool (lines, context)."""
    if isinstance(batch, RecordBatch):
        return batch.scored.reshape(-1, batch.scored.shape[-1])
    return np.ones((len(batch.rows), batch.tokens.shape[-1] - 1), bool)


def _within(scored: np.ndarray, p: Piece) -> np.ndarray:
    """Which targets of a line are scored and of this row, bool (context,)."""
    own = np.zeros(scored.shape[1], bool)
    own[p.start : p.stop - 1] = True
    return own & scored[p.line]


def worst_tokens(batch: AnyBatch, losses: np.ndarray, corpus: AnyCorpus, count: int = WORST) -> list[dict[str, Any]]:
    """Return the `count` scored targets with the largest loss, worst first, with the text before them."""
    windows, text = batch.tokens.reshape(-1, batch.tokens.shape[-1]), not isinstance(batch, RecordBatch)
    scored = _scored(batch)
    flat = np.where(scored, np.where(np.isfinite(losses), losses, np.inf), -np.inf).reshape(-1)
    found = _pieces(batch)
    owner = {(p.line, at): i for i, p in enumerate(found) for at in range(p.start, p.stop - 1)}
    table = []
    for index in np.argsort(-flat, kind="stable")[: min(count, np.count_nonzero(scored))]:
        line, at = divmod(int(index), losses.shape[1])
        i = owner[line, at]
        first = found[i].start
        token = found[i].row + at + 1 if text else found[i].row
        place = corpus.where(token)
        window = windows[line]
        table.append(
            {"row": i, "position": at - first, "token": token, "file": place.file,
             "offset": place.offset, "line": place.line, "loss": float(losses[line, at]), "id": int(window[at + 1]),
             "target": corpus.decode(window[at + 1 : at + 2]),
             "context": corpus.decode(window[max(first, at + 1 - CONTEXT) : at + 1])}
        )  # fmt: skip
    return table


def _order(x: float) -> float:
    return x if math.isfinite(x) else math.inf
