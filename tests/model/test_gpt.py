"""The model against the same one written with mlx.nn, its initial weights against their definition."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.model import gpt
from mlxdet.model.generate import generate, pick
from mlxdet.model.ops import ops_for
from mlxdet.seeds import Splitmix64
from tests.model import reference

VOCAB = 50
CONFIG = TrainConfig.of(preset="nano", layers=3, context=16, width=32, heads=4, mlp=48).resolve().model


@pytest.fixture(scope="module")
def weights(backend):
    rng = np.random.default_rng(1)
    # Larger than the initial ones, and no bias zero, so that every part of the model matters.
    return {k: mx.array((rng.standard_normal(s) * 0.2 + (1.0 if "norm" in k and k.endswith("weight") else 0)).astype(np.float32))
            for k, s in gpt.shapes(CONFIG, VOCAB).items()}  # fmt: skip


@pytest.fixture(scope="module")
def ids():
    return mx.array(np.random.default_rng(2).integers(0, VOCAB, (2, 17)).astype(np.int32))


def forward(weights, ids, ops, dtype=mx.float32):
    return gpt.logits(weights, gpt.hidden(weights, gpt.embed(weights, ids, dtype), CONFIG, ops))


@pytest.mark.parametrize("device", ["cpu", "metal", "cuda"])
def test_logits_and_gradients_equal_those_of_mlx_nn(weights, ids, device):
    """All three sets of kernels, run on the CPU here."""
    ops = ops_for(Backend(device, "deterministic"))
    table = reference.names(3)
    model = reference.GPT(VOCAB, 16, 3, 32, 4, 48)
    model.update(tree_unflatten([(table[k], w) for k, w in weights.items()]))
    x, y = ids[:, :-1], ids[:, 1:]
    np.testing.assert_allclose(np.array(forward(weights, x, ops)), np.array(model(x)), atol=2e-5)

    loss, grads = mx.value_and_grad(lambda w: ops.cross_entropy(forward(w, x, ops), y).sum())(weights)
    want_loss, want = nn.value_and_grad(model, lambda m: nn.losses.cross_entropy(m(x), y, reduction="sum"))(model)
    want = dict(tree_flatten(want))
    assert abs(loss.item() - want_loss.item()) < 1e-4
    for name in weights:
        expected = np.array(want[table[name]])
        assert np.abs(np.array(grads[name]) - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max()), name


def test_the_future_is_not_seen(weights, ids, backend):
    ops = ops_for(backend)
    changed = mx.array(np.concatenate([np.array(ids)[:, :10], (np.array(ids)[:, 10:16] + 1) % VOCAB], axis=1))
    a, b = np.array(forward(weights, ids[:, :16], ops)), np.array(forward(weights, changed, ops))
    assert np.array_equal(a[:, :10], b[:, :10]) and not np.array_equal(a[:, 10:], b[:, 10:])


def test_bfloat16_stays_bfloat16(weights, ids, backend):
    ops = ops_for(backend)
    h = gpt.hidden(weights, gpt.embed(weights, ids[:, :-1], mx.bfloat16), CONFIG, ops, mx.random.key(0))
    assert h.dtype == mx.bfloat16
    low, full = forward(weights, ids[:, :-1], ops, mx.bfloat16), forward(weights, ids[:, :-1], ops)
    assert low.dtype == mx.float32
    error = mx.abs(low - full).max().item()
    assert 0 < error < 0.3


def test_initial_weights_are_drawn_on_the_host_and_pinned():
    config = TrainConfig.of(preset="nano").resolve().model
    weights = gpt.init(config, 256, 7)
    assert all(w.dtype == np.float32 for w in weights.values())
    digest = hashlib.sha256(b"".join(weights[k].tobytes() for k in sorted(weights))).hexdigest()
    # Integers and IEEE products only: the same on every machine and in every version.
    assert digest == "9cf86fec18c3514dc5c9517dc6a1d0b9cbcf0e6d1519234a5ef331a225589082"
    # One weight by hand: the four 16-bit lanes of the first draw of the tensor's own stream.
    from mlxdet.seeds import stream

    draw = Splitmix64(stream(7, "init:token_embedding.weight")).next()
    lanes = sum((draw >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    unit = 0.02 / (4 * ((1 << 32) - 1) / 12) ** 0.5
    assert weights["token_embedding.weight"][0, 0] == pytest.approx((lanes - 2 * 65535) * unit, rel=1e-6)


def test_initial_weights_have_the_stated_spread():
    config = TrainConfig.of(preset="small").resolve().model
    weights = gpt.init(config, 1000, 3)
    for name, w in weights.items():
        if w.ndim == 1:
            assert np.all(w == (1.0 if name.endswith("weight") else 0.0))
            continue
        std = 0.02 / (12**0.5 if name.endswith(("out.weight", "down.weight")) else 1)
        assert abs(w.std() / std - 1) < 0.02 and abs(w.mean()) < 4 * std / w.size**0.5, name
        assert np.abs(w).max() <= 3.4642 * std


def test_every_tensor_and_every_bit_of_the_seed_matters():
    config = TrainConfig.of(preset="nano").resolve().model
    a = gpt.init(config, 256, 1)
    for other in (2, 1 + (1 << 32), 1 + (1 << 63)):
        b = gpt.init(config, 256, other)
        assert all(not np.array_equal(a[k], b[k]) for k in a if a[k].ndim > 1)
    matrices = [w.ravel()[:64].tobytes() for w in a.values() if w.ndim > 1]
    assert len(set(matrices)) == len(matrices)


def test_generation_with_kept_keys_equals_reading_everything_again(weights, backend):
    ops, prompt = ops_for(backend), [3, 1, 4]
    got = list(generate(weights, CONFIG, ops, mx.float32, prompt, 13, temperature=0, top_k=0, rng=Splitmix64(0)))
    text = list(prompt)
    for _ in range(13):
        text.append(int(np.array(forward(weights, mx.array([text]), ops))[0, -1].argmax()))
    assert got == text[3:]


def test_generation_goes_on_past_the_context_and_repeats(weights, backend):
    ops = ops_for(backend)

    def run(seed, length=40):
        return list(
            generate(weights, CONFIG, ops, mx.float32, [1] * 30, length, temperature=1.0, top_k=5, rng=Splitmix64(seed))
        )

    assert len(run(1)) == 40 and run(1) == run(1) and run(1) != run(2)
    assert run(1)[:10] == run(1, 10)


def test_pick_follows_the_distribution():
    logits = np.log(np.array([0.1, 0.2, 0.7]))
    rng = Splitmix64(5)
    counts = np.bincount([pick(logits, 1.0, 0, rng) for _ in range(10_000)], minlength=3)
    assert np.abs(counts / 10_000 - [0.1, 0.2, 0.7]).max() < 0.015
    assert {pick(logits, 1.0, 1, rng) for _ in range(20)} == {2}
    assert {pick(logits, 5.0, 2, rng) for _ in range(200)} == {1, 2}
    assert pick(np.array([1.0, 3.0, 3.0]), 0, 0, rng) == 1


def test_dropout_uses_its_key_and_keeps_the_mean(weights, ids, backend):
    import dataclasses

    config = dataclasses.replace(CONFIG, dropout=0.5)
    ops, e = ops_for(backend), gpt.embed(weights, ids[:, :-1], mx.float32)

    def run(key):
        return np.array(gpt.hidden(weights, e, config, ops, key))

    assert np.array_equal(run(mx.random.key(1)), run(mx.random.key(1)))
    assert not np.array_equal(run(mx.random.key(1)), run(mx.random.key(2)))
    assert np.array_equal(run(None), np.array(gpt.hidden(weights, e, CONFIG, ops)))
    x = mx.ones((1000, 100))
    dropped = np.array(gpt._drop(x, 0.25, mx.random.key(3)))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)} and abs(dropped.mean() - 1) < 0.01
