"""Adapters: names, initial values, the forward pass, gradients, the frozen base, merging."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.auditing.audit import audit_targets
from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.errors import UsageError
from mlxdet.formats.digest import content_digest
from mlxdet.formats.safetensors import read_safetensors, write_safetensors
from mlxdet.formats.tensor import from_numpy
from mlxdet.model import gpt, lora
from mlxdet.model.ops import ops_for

VOCAB, RANK, SCALE = 40, 4, 2.0
CONFIG = TrainConfig.of(preset="nano", layers=2, context=16, width=32, heads=4, mlp=48).resolve().model
SHAPES = gpt.shapes(CONFIG, VOCAB)
ALL = lora.parse_targets("all")


@pytest.fixture(scope="module")
def base():
    rng = np.random.default_rng(1)
    return {k: (rng.standard_normal(s) * 0.2 + (1.0 if "norm" in k and k.endswith("weight") else 0)).astype(np.float32)
            for k, s in SHAPES.items()}  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """Adapters whose `up` is no longer zero."""
    rng = np.random.default_rng(2)
    return {k: (rng.standard_normal(s) * 0.1).astype(np.float32) for k, s in lora.shapes(SHAPES, RANK, ALL).items()}


@pytest.fixture(scope="module")
def ids():
    return mx.array(np.random.default_rng(3).integers(0, VOCAB, (2, 13)).astype(np.int32))


def device(tree):
    return {k: mx.array(v) for k, v in tree.items()}


def logits(weights, ids, ops, key=None, dropout=0.0, dtype=mx.float32):
    e = gpt.embed(weights, ids, dtype)
    return gpt.logits(weights, gpt.hidden(weights, e, CONFIG, ops, key, lora_dropout=dropout))


def loss(adapters, base, ids, ops, key=None, dropout=0.0):
    return ops.cross_entropy(
        logits(lora.joined(base, adapters, SCALE), ids[:, :-1], ops, key, dropout), ids[:, 1:]
    ).sum()


def test_names_and_shapes_are_those_of_the_field():
    table = lora.shapes(SHAPES, RANK, ("qkv", "down"))
    assert table == {
        "blocks.0.attention.qkv.lora.down": (4, 32),
        "blocks.0.attention.qkv.lora.up": (96, 4),
        "blocks.0.mlp.down.lora.down": (4, 48),
        "blocks.0.mlp.down.lora.up": (32, 4),
        "blocks.1.attention.qkv.lora.down": (4, 32),
        "blocks.1.attention.qkv.lora.up": (96, 4),
        "blocks.1.mlp.down.lora.down": (4, 48),
        "blocks.1.mlp.down.lora.up": (32, 4),
    }
    assert list(table) == sorted(table)
    every = lora.shapes(SHAPES, RANK, ALL)
    # rank * (in + out), by hand: qkv 32 + 96, out 32 + 32, up 32 + 48, down 48 + 32
    assert sum(a * b for a, b in every.values()) == 2 * 4 * (128 + 64 + 80 + 80)


def test_targets_are_parsed_in_one_order_and_nothing_else_is_taken():
    assert ALL == ("qkv", "out", "up", "down") == lora.parse_targets("down, up,out,qkv")
    assert lora.parse_targets("down,qkv") == ("qkv", "down")
    for text in ("", "query", "qkv,", "qkv,qkv", "all,qkv", "QKV"):
        with pytest.raises(UsageError, match=r"--lora-targets.*qkv,out,up,down"):
            lora.parse_targets(text)


def test_fresh_adapters_are_drawn_on_the_host_and_pinned():
    adapters = lora.init(SHAPES, RANK, ALL, 7)
    assert {k: a.shape for k, a in adapters.items()} == lora.shapes(SHAPES, RANK, ALL)
    assert all(a.dtype == np.float32 for a in adapters.values())
    digest = hashlib.sha256(b"".join(adapters[k].tobytes() for k in sorted(adapters))).hexdigest()
    assert digest == "3a5f0e106c68289f7004e5b0701f1d097beb9f26c5b2f5f6d7c1b2cbe26a2edd"
    # The same number by hand: the first draw of the stream of that name, its top 24 bits, symmetric within 1 / sqrt(32).
    from mlxdet.seeds import Splitmix64, stream

    name = "blocks.1.mlp.up.lora.down"
    top = Splitmix64(stream(7, "init:" + name)).next() >> 40
    assert adapters[name][0, 0] == np.float32((2 * top + 1 - 2**24) / 2**24 / np.sqrt(32.0))
    # One target alone, or another rank's name, does not move the others; another seed does.
    assert np.array_equal(lora.init(SHAPES, RANK, ("up",), 7)[name], adapters[name])
    assert not np.array_equal(lora.init(SHAPES, RANK, ALL, 8)[name], adapters[name])


def test_fresh_adapters_are_uniform_and_up_is_zero():
    adapters = lora.init({"blocks.0.mlp.up.weight": (8, 10_000)}, 100, ("up",), 0)
    down = adapters["blocks.0.mlp.up.lora.down"] * 100  # within 1
    assert not adapters["blocks.0.mlp.up.lora.up"].any()
    assert np.abs(down).max() <= 1.0 and not (down == 0).any()
    counts = np.histogram(down, 20, (-1, 1))[0]  # a million draws: 50,000 each, deviation 218
    assert np.abs(counts - 50_000).max() < 5 * 218
    assert abs(float(down.mean())) < 5 / np.sqrt(3e6)


@pytest.mark.parametrize("name", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_fresh_adapters_give_the_logits_of_the_base_to_the_bit(base, trained, ids, name, dtype):
    ops, weights = ops_for(Backend(name, "deterministic")), device(base)
    fresh = device(lora.init(SHAPES, RANK, ALL, 0))
    want = np.array(logits(weights, ids, ops, dtype=dtype))
    assert logits(lora.joined(weights, fresh, SCALE), ids, ops, dtype=dtype).dtype == mx.float32
    assert np.array(logits(lora.joined(weights, fresh, SCALE), ids, ops, dtype=dtype)).tobytes() == want.tobytes()
    adapted = np.array(logits(lora.joined(weights, device(trained), SCALE), ids, ops, dtype=dtype))
    assert np.abs(adapted - want).max() > 0.1


@pytest.mark.parametrize("targets", [("qkv",), ("out",), ("up",), ("down",), ALL])
def test_merged_weights_do_what_the_adapted_ones_do(base, trained, ids, backend, targets):
    ops = ops_for(backend)
    adapters = {k: v for k, v in trained.items() if k in lora.shapes(SHAPES, RANK, targets)}
    merged = lora.merge(base, adapters, SCALE)
    a = np.array(logits(lora.joined(device(base), device(adapters), SCALE), ids, ops))
    b = np.array(logits(device(merged), ids, ops))
    plain = np.array(logits(device(base), ids, ops))
    assert np.abs(a - b).max() < 1e-5 * np.abs(a).max() < 1e-2 * np.abs(a - plain).max()
    changed = {k for k in base if not np.array_equal(base[k], merged[k])}
    assert changed == {k.removesuffix(".lora.up") + ".weight" for k in adapters if k.endswith(".up")}
    assert all(w.dtype == np.float32 for w in merged.values())


def test_merging_is_float64_rounded_once(base, trained):
    """By numpy's own product: at most the last bit differs, where float64 sums in another order round otherwise."""
    merged = lora.merge(base, trained, 0.37)
    for name in ("blocks.0.attention.qkv", "blocks.1.mlp.down"):
        up, down = (trained[f"{name}.lora.{side}"].astype(np.float64) for side in ("up", "down"))
        want = (base[name + ".weight"] + 0.37 * (up @ down)).astype(np.float32)
        got = merged[name + ".weight"]
        assert np.abs(got.view(np.int32) - want.view(np.int32)).max() <= 1 and (got == want).mean() > 0.999
    fresh = lora.merge(base, lora.init(SHAPES, RANK, ALL, 0), 0.37)
    assert lora.base_digest(fresh) == lora.base_digest(base)


@pytest.mark.parametrize("what", ["partner", "rank", "shape", "unknown"])
def test_an_adapter_that_does_not_fit_is_refused(base, trained, what):
    bad, name = dict(trained), "blocks.1.mlp.up.lora.down"
    if what == "partner":
        del bad[name]
    elif what == "rank":
        bad[name] = bad[name][:3]
    elif what == "shape":
        bad[name] = bad[name][:, :-1]
    else:
        bad["blocks.7.mlp.up.lora.down"] = bad[name]
    with pytest.raises(UsageError, match=r"does not fit this base: blocks\.[17]\.mlp\.up$"):
        lora.merge(base, bad, SCALE)


def test_gradients_equal_those_through_the_merged_weights(base, trained, ids, backend):
    """By the chain rule from the full gradient G of W, in float64: d_up = scale G down^T, d_down = scale up^T G."""
    ops = ops_for(backend)
    weights = device(base)
    value, grads = mx.value_and_grad(loss)(device(trained), weights, ids, ops)
    merged = device(lora.merge(base, trained, SCALE))
    full_loss, full = mx.value_and_grad(
        lambda w: ops.cross_entropy(logits(w, ids[:, :-1], ops), ids[:, 1:]).sum()
    )(merged)  # fmt: skip
    assert value.item() == pytest.approx(full_loss.item(), rel=1e-5)
    assert set(grads) == set(trained)  # and nothing of the base
    for stem in {k.rsplit(".lora.", 1)[0] for k in trained}:
        g = np.array(full[stem + ".weight"], np.float64)
        up, down = trained[stem + ".lora.up"].astype(np.float64), trained[stem + ".lora.down"].astype(np.float64)
        for name, want in ((".lora.up", SCALE * g @ down.T), (".lora.down", SCALE * up.T @ g)):
            assert np.abs(np.array(grads[stem + name]) - want).max() <= 2e-5 * np.abs(want).max(), stem + name


def test_the_base_is_frozen_and_its_digest_says_so(base, trained, ids, backend, tmp_path):
    """Steps along the gradient lower the loss and leave the base's content digest; a changed bit would show."""
    ops, weights = ops_for(backend), device(base)
    before = lora.base_digest({k: np.array(v) for k, v in weights.items()})
    step = mx.compile(lambda a, w: mx.value_and_grad(lambda a: loss(a, w, ids, ops))(a))
    adapters, losses = device(lora.init(SHAPES, RANK, ALL, 0)), []
    for _ in range(5):
        value, grads = step(adapters, weights)
        losses.append(value.item())
        adapters = {k: a - 0.002 * grads[k] for k, a in adapters.items()}
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0]
    assert lora.base_digest({k: np.array(v) for k, v in weights.items()}) == before
    with (tmp_path / "base.safetensors").open("wb") as file:
        write_safetensors(file, {k: from_numpy(v) for k, v in base.items()})
    assert content_digest(read_safetensors(tmp_path / "base.safetensors")[0]) == before
    name = "blocks.0.norm1.bias"
    assert lora.base_digest(base | {name: np.nextafter(base[name], np.float32(9))}) != before


def test_dropout_of_the_adapters_input_takes_explicit_keys(base, trained, ids, backend):
    ops, weights = ops_for(backend), lora.joined(device(base), device(trained), SCALE)
    key = mx.random.key(1)
    plain = np.array(logits(weights, ids, ops))
    assert np.array_equal(plain, np.array(logits(weights, ids, ops, None, 0.5)))  # no key: off
    assert np.array_equal(plain, np.array(logits(weights, ids, ops, key, 0.0)))
    a = np.array(logits(weights, ids, ops, key, 0.5))
    mx.random.uniform().item()  # a stray draw
    assert np.array_equal(a, np.array(logits(weights, ids, ops, key, 0.5))) and not np.array_equal(a, plain)
    assert not np.array_equal(a, np.array(logits(weights, ids, ops, mx.random.key(2), 0.5)))
    # The base's own path is not dropped, and the mask keeps the mean.
    fresh = lora.joined(device(base), device(lora.init(SHAPES, RANK, ALL, 0)), SCALE)
    assert np.array_equal(np.array(logits(device(base), ids, ops)), np.array(logits(fresh, ids, ops, key, 0.5)))
    one = {k: v for k, v in weights.items() if ".lora." not in k or k.startswith("blocks.1.mlp.down.")}
    values = [np.array(logits(one, ids, ops, mx.random.key(s), 0.3)) for s in range(200)]
    rest = np.mean(values, axis=0) - np.array(logits(one, ids, ops))
    assert np.abs(rest).max() < 0.3 * np.std(values, axis=0).max()


@pytest.mark.parametrize("target", ["metal", "cuda", "cpu"])
def test_the_adapters_gradient_has_no_leak(base, trained, ids, target):
    """And no gradient of an embedding: its lookup only reads."""
    ops = ops_for(Backend(target, "deterministic"))
    step = lambda a, w, ids, key: mx.value_and_grad(lambda a: loss(a, w, ids, ops, key, 0.1))(a)  # noqa: E731
    found = audit_targets(step, (device(trained), device(base), ids, mx.random.key(0)), {}, (target,))[target]
    assert found.ok and found.primitives > 200, str(found)
