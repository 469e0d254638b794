"""The step on rows: gradients against autograd's and by hand, masks, accumulation, frozen bases, validation."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.config import TrainConfig
from mlxdet.data.packing import RecordBatch, lay_out, pieces
from mlxdet.data.templates import Tokens
from mlxdet.model import gpt, lora
from mlxdet.training.evaluate import Evaluator
from mlxdet.training.reference import with_reference
from mlxdet.training.step import TrainStep, fresh_state, initial_state
from mlxdet.training.write import until

VOCAB = 40
SMALL = {"preset": "nano", "layers": 1, "width": 16, "heads": 2, "context": 12, "mlp": 32, "batch": 2, "steps": 50}


def config(**values):
    return TrainConfig.of(**(SMALL | values)).resolve()


def rows(lengths, seed=0):
    """Rows of ids, the second half of each scored."""
    rng = np.random.default_rng(seed)
    return [Tokens(rng.integers(1, VOCAB, n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths]


def batch(lines, groups, packed=False, length=12):
    """`lines`: rows in each line."""
    laid = lay_out(lines, length)
    parts = [a.reshape(groups, -1, a.shape[-1]) for a in laid[:4]]
    return RecordBatch(
        1, *parts[:2], *(parts[2:] if packed else (None, None)), np.arange(len(laid.spans)), laid.spans, ""
    )


def gradients(step, state, b):
    total, grads = step.begin(state, b)
    return np.array(total), {k: np.array(g) for k, g in grads.items()}


@pytest.mark.parametrize(("objective", "packed"), [("sft", False), ("sft", True), ("orpo", False)])
def test_lookups_outside_autograd_give_its_gradient(backend, objective, packed):
    values = {"objective": objective, "packing": packed}
    b = batch([rows([5, 7]), rows([4, 3, 5], 1)] if packed else [rows([9]), rows([13], 1)], 1, packed)
    state = initial_state(config(**values), VOCAB)
    (x, own), (y, auto) = (
        gradients(TrainStep(config(**values, kernels=k), VOCAB, backend), state, b)
        for k in ("deterministic", "default")
    )
    assert x == pytest.approx(y, rel=1e-6)
    for name in own:
        assert np.abs(own[name] - auto[name]).max() <= 2e-6 * np.abs(auto[name]).max(), name
    assert np.abs(own[gpt.POSITIONS]).max() > 0
    # The last position that any row of a packed window reaches; beyond it the table is not touched.
    if packed:
        assert np.abs(own[gpt.POSITIONS][6:]).max() == 0 < np.abs(own[gpt.POSITIONS][5]).max()


def test_packed_rows_are_trained_as_if_each_had_its_own_line(backend):
    a, b, c, d = (rows([n], n)[0] for n in (5, 7, 4, 8))
    state = initial_state(config(objective="sft"), VOCAB)
    one = TrainStep(config(objective="sft", packing=True), VOCAB, backend)
    other = TrainStep(config(objective="sft", batch=4), VOCAB, backend)
    (x, packed), (y, alone) = (
        gradients(one, state, batch([[a, b], [c, d]], 1, True)),
        gradients(other, state, batch([[a], [b], [c], [d]], 1)),
    )
    assert x == pytest.approx(y, rel=1e-6)
    for name in packed:
        assert np.abs(packed[name] - alone[name]).max() <= 5e-6 * np.abs(alone[name]).max(), name


def test_only_what_is_scored_counts_and_each_token_the_same(backend):
    """The mean over all scored tokens of a step of two micro-batches, by the model itself."""
    lines = [rows([9]), rows([13], 1), rows([4], 2), rows([6], 3)]
    step = TrainStep(config(objective="sft", accumulation=2), VOCAB, backend)
    state = initial_state(step.config, VOCAB)
    b = batch(lines, 2)
    _, outcome = step(state, b)
    total, count = 0.0, 0
    for ids, scored in (line[0] for line in lines):
        logits = gpt.logits(state.weights, gpt.hidden(state.weights, gpt.embed(state.weights, mx.array(ids[None, :-1]),
                            mx.float32), step.config.model, step.ops))  # fmt: skip
        p = np.array(logits, np.float64)[0]
        logp = p - np.log(np.exp(p - p.max(1, keepdims=True)).sum(1, keepdims=True)) - p.max(1, keepdims=True)
        total -= sum(logp[t - 1, ids[t]] for t in range(1, len(ids)) if scored[t])
        count += int(scored.sum())
    assert step.units(b) == count == 5 + 7 + 2 + 3
    assert outcome.loss.item() == pytest.approx(total / count, rel=1e-6)
    assert outcome.measures.tolist() == [outcome.loss.item()]
    # The control: a mask off by one target.
    shifted = RecordBatch(1, b.tokens, np.roll(b.scored, 1, axis=-1), None, None, b.rows, b.spans, "")
    assert step(state, shifted)[1].loss.item() != pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("objective", ["lm", "sft", "dpo", "orpo", "simpo"])
def test_with_adapters_only_they_move(backend, objective):
    c = config(objective=objective, base="x", lora_rank=2)
    weights = {k: mx.array(v) for k, v in gpt.init(c.model, VOCAB, 0).items()}
    before = {k: np.array(v).tobytes() for k, v in weights.items()}
    adapters = {
        k: mx.array(v) for k, v in lora.init(gpt.shapes(c.model, VOCAB), 2, ("qkv", "out", "up", "down"), 1).items()
    }
    step = TrainStep(c, VOCAB, backend)
    pairs = objective in ("dpo", "orpo", "simpo")
    b = batch([rows([9], i) for i in range(4 if pairs else 2)], 1)
    if objective == "dpo":
        values = np.array([[-3.0, -4.0], [-5.0, -2.0]], np.float32)
        b = with_reference(RecordBatch(1, b.tokens, b.scored, None, None, np.arange(2), b.spans, ""), values)
        assert b.reference.tolist() == [[-3.0, -5.0, -4.0, -2.0]]
    if objective == "lm":
        from mlxdet.data.batches import Batch

        b = Batch(1, b.tokens, np.arange(2), "")
    state, outcome = step(fresh_state(adapters, weights), b)
    assert outcome.applied.item() and outcome.grad_norm.item() > 0
    assert {k: np.array(v).tobytes() for k, v in state.base.items()} == before
    assert set(state.weights) == set(adapters) == set(state.first)
    ups = [k for k in adapters if k.endswith(".up")]
    assert all(np.array(state.weights[k]).any() for k in ups)
    assert not any(np.array(adapters[k]).any() for k in ups)
    assert set(step.model(state)) == set(weights) | set(adapters)


def test_accumulated_pairs_are_one_batch(backend):
    lines = [rows([n], n) for n in (9, 5, 7, 11, 6, 8, 10, 13)]  # 4 pairs: chosen 0 to 3, rejected 4 to 7
    c = config(objective="orpo", batch=4)
    state = initial_state(c, VOCAB)
    one = TrainStep(c, VOCAB, backend)(state, batch(lines, 1))[1]
    halves = [lines[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    c = config(objective="orpo", batch=2, accumulation=2)
    two = TrainStep(c, VOCAB, backend)(state, batch(halves, 2))[1]
    assert two.measures.tolist() == pytest.approx(one.measures.tolist(), rel=1e-5)
    assert two.grad_norm.item() == pytest.approx(one.grad_norm.item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo", "simpo"])
def test_validation_is_the_step_without_noise(backend, objective):
    c = config(objective=objective, **({"base": "x"} if objective == "dpo" else {}))
    step, evaluator = TrainStep(c, VOCAB, backend), Evaluator(c, backend)
    state = initial_state(c, VOCAB)
    pairs = step.objective.pairs
    b = batch([rows([n], n) for n in ((9, 5, 7, 11) if pairs else (9, 5))], 1)
    references = []
    if objective == "dpo":
        references = [evaluator.score(state.weights, b.tokens[0], b.scored[0]) + np.float32(0.5) * np.arange(4)]
        values = references[0].astype(np.float32).reshape(2, 2).T
        b = with_reference(RecordBatch(1, b.tokens, b.scored, None, None, np.arange(2), b.spans, ""), values)
        references = [b.reference[0]]
    _, outcome = step(state, b)
    found = evaluator.means(state.weights, [(b.tokens[0], b.scored[0])], references)
    assert list(found) == list(step.objective.measures)
    assert list(found.values()) == pytest.approx(outcome.measures.tolist(), rel=1e-6)
    assert all(map(math.isfinite, found.values()))


def test_pieces_of_packed_lines_and_of_pairs():
    a, b, c = rows([4, 3, 6])
    packed = batch([[a, b], [c]], 1, True)
    assert [tuple(p) for p in pieces(packed)] == [(0, "", 0, 0, 4), (1, "", 0, 4, 7), (2, "", 1, 0, 6)]
    laid = batch([[a], [b], [c], [a]], 2)  # two micro-batches of one pair
    pairs = RecordBatch(1, laid.tokens, laid.scored, None, None, np.array([7, 9]), laid.spans, "")
    assert [(p.row, p.side) for p in pieces(pairs)] == [(7, "chosen"), (7, "rejected"), (9, "chosen"), (9, "rejected")]


@pytest.mark.parametrize(
    ("ids", "end", "want"),
    [([1, 2, 3], [], [1, 2, 3]), ([1, 2, 3], [2], [1]), ([1, 2, 2, 3, 9], [2, 3], [1, 2]), ([5, 5, 5, 6], [5, 5, 6], [5]),
     ([1, 2], [2, 3], [1, 2]), ([2, 3], [2, 3], []), ([], [1], [])],
)  # fmt: skip
def test_an_answer_ends_before_its_marker(ids, end, want):
    assert list(until(iter(ids), end)) == want
