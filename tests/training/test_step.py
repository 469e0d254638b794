"""The step as a function: repeatable, accumulation-true, guarded, and AdamW by the book."""

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch
from mlxdet.model import gpt
from mlxdet.training.step import State, TrainStep, initial_state, random_key, tree_sum

VOCAB = 40
SMALL = {"preset": "nano", "layers": 1, "width": 16, "heads": 2, "context": 12, "mlp": 32, "batch": 4, "steps": 50}


def make(backend, **values):
    config = TrainConfig.of(**(SMALL | values)).resolve()
    return TrainStep(config, VOCAB, backend), initial_state(config, VOCAB)


def batch(step=1, accumulation=1, size=4, seed=0):
    tokens = np.random.default_rng(seed + step).integers(0, VOCAB, (accumulation, size, 13)).astype(np.int32)
    return Batch(step, tokens, np.arange(accumulation * size), "0" * 16)


def bits(state):
    saved = state.snapshot()
    return {
        f"{i}.{k}": v.tobytes() for i, t in enumerate((saved.weights, saved.first, saved.second)) for k, v in t.items()
    }


@pytest.mark.parametrize(
    "values",
    [{}, {"dtype": "bfloat16"}, {"dropout": 0.3}, {"neftune_alpha": 5.0}, {"kernels": "default"}, {"grad_clip": 0.0},
     {"accumulation": 3, "dropout": 0.1, "dtype": "bfloat16"}],
)  # fmt: skip
def test_twenty_repetitions_of_a_step_are_one(backend, values):
    step, state = make(backend, **values)
    b = batch(accumulation=values.get("accumulation", 1))
    seen = set()
    for _ in range(20):
        after, outcome = step(state, b)
        seen.add((outcome.loss.item().hex(), outcome.grad_norm.item().hex(), *bits(after).items()))
    assert len(seen) == 1
    assert bits(after) != bits(state) and outcome.applied.item() is True


def test_repetition_would_see_a_race(backend, monkeypatch):
    """The negative control: the same test with an embedding gradient that adds in a random order."""
    from mlxdet.measure import faults
    from mlxdet.model import embedding

    monkeypatch.setattr(embedding, "METHODS", dict(embedding.METHODS))
    monkeypatch.setattr(faults, "_uncompiled", lambda: None)
    faults.race()
    step, state = make(backend)
    rng = np.random.default_rng(0)
    b = Batch(1, rng.integers(0, 3, (1, 4, 13)).astype(np.int32), np.arange(4), "")
    mx.disable_compile()
    try:
        seen = {tuple(bits(step(state, b)[0]).items()) for _ in range(20)}
    finally:
        mx.enable_compile()
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["dropout", "neftune_alpha"])
def test_noise_differs_by_step_and_micro_batch_and_seed_and_nothing_else(backend, name):
    step, state = make(backend, **{name: 0.5})
    same = batch(1)
    first = step(state, same)[1].loss.item()
    mx.random.uniform().item()  # a stray draw from the global generator
    assert step(state, same)[1].loss.item() == first
    second = Batch(2, same.tokens, same.rows, "")
    later = State(state.weights, state.first, state.second, 1)
    assert step(later, second)[1].loss.item() != first
    other, _ = make(backend, seed=1, init_seed=0, data_seed=0, **{name: 0.5})
    assert other(state, same)[1].loss.item() != first
    keys = {
        tuple(random_key(s, n, t, m).tolist()) for s in (0, 1, 1 << 40) for n in "ab" for t in (1, 2) for m in (0, 1)
    }
    assert len(keys) == 24
    plain, _ = make(backend)
    assert plain(state, same)[1].loss.item() != first


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8])
def test_micro_batches_are_added_in_a_binary_tree_over_their_index(n):
    expected = {1: "0", 2: "(0+1)", 3: "((0+1)+2)", 4: "((0+1)+(2+3))", 5: "(((0+1)+(2+3))+4)",
                7: "(((0+1)+(2+3))+((4+5)+6))", 8: "(((0+1)+(2+3))+((4+5)+(6+7)))"}  # fmt: skip
    assert tree_sum(map(str, range(n)), lambda a, b: f"({a}+{b})") == expected[n]


def test_two_or_four_workers_can_give_the_bits_of_one():
    values = np.random.default_rng(0).standard_normal(8).astype(np.float32)

    def total(parts):
        return tree_sum(parts, lambda a, b: np.float32(a + b))

    whole = total(values)
    for workers in (2, 4):
        assert total([total(part) for part in np.split(values, workers)]) == whole


def test_accumulation_gives_the_gradient_of_one_large_batch(backend):
    large, state = make(backend, batch=12)
    split, _ = make(backend, batch=4, accumulation=3)
    tokens = np.random.default_rng(5).integers(0, VOCAB, (12, 13)).astype(np.int32)
    a, m = large(state, Batch(1, tokens[None], np.arange(12), ""))
    b, n = split(state, Batch(1, tokens.reshape(3, 4, 13), np.arange(12), ""))
    assert m.loss.item() == pytest.approx(n.loss.item(), rel=1e-6)
    for k, x in a.first.items():
        x, y = np.array(x), np.array(b.first[k])
        assert np.abs(x - y).max() <= 2e-6 * np.abs(x).max(), k


def test_deterministic_and_default_kernels_are_the_same_step_to_rounding(backend):
    a, state = make(backend)
    b, _ = make(backend, kernels="default")
    x, y = a(state, batch())[0], b(state, batch())[0]
    for k in x.first:
        p, q = np.array(x.first[k]), np.array(y.first[k])
        assert np.abs(p - q).max() <= 1e-6 * np.abs(p).max(), k


def test_adamw_equals_float64_by_the_book(backend):
    values = {
        "max_lr": 0.01,
        "min_lr": 0.01,
        "warmup": 0,
        "weight_decay": 0.1,
        "grad_clip": 0.5,
        "beta1": 0.8,
        "beta2": 0.9,
    }
    step, state = make(backend, **values)
    w = {k: np.array(v, np.float64) for k, v in state.weights.items()}
    m, v = ({k: np.zeros_like(x) for k, x in w.items()} for _ in range(2))
    for t in (1, 2, 3):
        b = batch(t)
        _, grads = step.gradient(state.weights, mx.array(b.tokens[0]), [None, None])
        g = {k: np.array(x, np.float64) / 48 for k, x in grads.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        state, outcome = step(state, b)
        assert outcome.grad_norm.item() == pytest.approx(norm, rel=1e-5)
        for k in w:
            clipped = g[k] * min(1.0, 0.5 / (norm + 1e-6))
            m[k] = 0.8 * m[k] + 0.2 * clipped
            v[k] = 0.9 * v[k] + 0.1 * clipped**2
            decay = 0.01 * 0.1 * w[k] if w[k].ndim > 1 else 0.0
            w[k] = w[k] - decay - 0.01 * (m[k] / (1 - 0.8**t)) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-8)
            # Where a gradient is rounding noise Adam divides noise by itself, so compare the bulk tightly, all loosely.
            error = np.abs(np.array(state.weights[k]) - w[k])
            assert np.median(error) < 2e-6 and error.max() < 0.011 * t, k
            np.testing.assert_allclose(np.array(state.first[k]), m[k], atol=1e-6)


def test_a_non_finite_loss_changes_nothing_and_says_so(backend):
    step, state = make(backend)
    for bad in (np.nan, np.inf):
        weights = dict(state.weights)
        weights["blocks.0.mlp.up.weight"] = weights["blocks.0.mlp.up.weight"] * 1.0
        poisoned = np.array(weights["blocks.0.mlp.up.weight"])
        poisoned[3, 3] = bad
        weights["blocks.0.mlp.up.weight"] = mx.array(poisoned)
        before = State(weights, state.first, state.second, 0)
        after, outcome = step(before, batch())
        assert outcome.applied.item() is False and not np.isfinite(outcome.loss.item())
        assert bits(after) == bits(before)


def test_weights_and_moments_stay_float32_whatever_the_activations(backend):
    step, state = make(backend, dtype="bfloat16")
    after, outcome = step(state, batch())
    assert {a.dtype for a in after.arrays()} == {mx.float32} and outcome.loss.dtype == mx.float32
    _, grads = step.gradient(state.weights, mx.array(batch().tokens[0]), [None, None])
    assert {g.dtype for g in grads.values()} == {mx.float32}
    full, _ = make(backend)
    assert abs(full(state, batch())[1].loss.item() - outcome.loss.item()) < 0.02


def test_initial_state_is_the_hosts(backend):
    config = TrainConfig.of(**SMALL, seed=3).resolve()
    want = gpt.init(config.model, VOCAB, 3)
    got = initial_state(config, VOCAB).snapshot()
    assert all(np.array_equal(want[k], got.weights[k]) for k in want)
    assert not any(np.any(x) for x in [*got.first.values(), *got.second.values()])
