"""Rows packed into one window train as each row does alone, and no operation of that races."""

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.auditing.audit import audit_targets
from mlxdet.backends import Backend
from mlxdet.backends.cuda import attention as plain
from mlxdet.config import TrainConfig
from mlxdet.data.packing import lay_out
from mlxdet.data.templates import Tokens
from mlxdet.model import fastmath, gpt
from mlxdet.model.embedding import segment_sum
from mlxdet.model.ops import ops_for
from mlxdet.training import objectives

VOCAB, CONTEXT = 50, 24
CONFIG = TrainConfig.of(preset="nano", layers=2, context=CONTEXT, width=32, heads=4, mlp=48).resolve().model


@pytest.fixture(scope="module")
def weights(backend):
    rng = np.random.default_rng(1)
    return {k: mx.array((rng.standard_normal(s) * 0.2 + (1.0 if "norm" in k and k.endswith("weight") else 0)).astype(np.float32))
            for k, s in gpt.shapes(CONFIG, VOCAB).items()}  # fmt: skip


def rows():
    rng = np.random.default_rng(2)
    lengths = [9, 5, 11, 2, 7, 16]
    return [Tokens(rng.integers(0, VOCAB, n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths]


def gradient(weights, tokens, scored, positions, segments, ops, dtype=mx.float32):
    """Loss and gradients as the training step computes them: both tables' lookups outside autograd."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]

    def loss(w, e):
        h = gpt.hidden(w, e, CONFIG, ops, segments=segments)
        return objectives.tokens(-ops.cross_entropy(gpt.logits(w, h), targets), scored)[0]

    e = gpt.embed(weights, ids, dtype, positions)
    value, (grads, found) = mx.value_and_grad(loss, argnums=(0, 1))(weights, e)
    grads[gpt.TOKENS] = grads[gpt.TOKENS] + segment_sum("onehot", ids, found, VOCAB)
    if positions is not None:
        grads[gpt.POSITIONS] = segment_sum("onehot", positions, found, CONTEXT)
    return value, grads


def arrays(lines, packed=True):
    parts = [mx.array(part) for part in lines[:4]]
    return parts if packed else [*parts[:2], None, None]


@pytest.mark.parametrize("device", ["cpu", "metal", "cuda"])
def test_packed_rows_give_the_loss_and_gradients_of_each_row_alone(weights, device):
    """All three sets of kernels, run on the CPU here. Negative control: without segments it does not."""
    ops, data = ops_for(Backend(device, "deterministic")), rows()
    lines = lay_out([data[:3], data[3:]], CONTEXT)  # 25 and 25 of 25 tokens
    assert (lines.segments[0] == [0] * 9 + [1] * 5 + [2] * 10).all()
    loss, grads = gradient(weights, *arrays(lines), ops)
    alone = [gradient(weights, *arrays(lay_out([[row]], len(row.ids) - 1), packed=False), ops) for row in data]
    want = sum(part[0].item() for part in alone)
    assert loss.item() == pytest.approx(want, rel=1e-6)
    for name in weights:
        expected = np.sum([np.array(part[1][name], np.float64) for part in alone], axis=0)
        assert np.abs(np.array(grads[name]) - expected).max() <= 3e-6 * np.abs(expected).max(), name

    one, other = arrays(lines), arrays(lines)
    one[3] = mx.zeros_like(one[3])  # one segment: rows look at the rows before them
    other[2] = mx.broadcast_to(mx.arange(CONTEXT, dtype=mx.int32), other[2].shape)  # positions that run on
    for wrong in (one, other):
        assert abs(gradient(weights, *wrong, ops)[0].item() - want) > 1e-3 * want


@pytest.mark.parametrize("device", ["cpu", "metal", "cuda"])
def test_a_row_does_not_see_its_neighbours_or_the_padding(weights, device):
    """To the bit: what is masked adds an exact zero. bfloat16 as well."""
    ops, data = ops_for(Backend(device, "deterministic")), rows()
    lines = lay_out([data[:2]], CONTEXT)
    changed = lines.tokens.copy()
    changed[0, :9] = (changed[0, :9] + 1) % VOCAB
    changed[0, 14:] = 7
    for dtype in (mx.float32, mx.bfloat16):

        def hidden(tokens, dtype=dtype):
            e = gpt.embed(weights, mx.array(tokens[:, :-1]), dtype, mx.array(lines.positions))
            return np.array(gpt.hidden(weights, e, CONFIG, ops, segments=mx.array(lines.segments)).astype(mx.float32))

        a, b = hidden(lines.tokens), hidden(changed)
        assert np.array_equal(a[0, 9:14], b[0, 9:14])
        assert not np.array_equal(a[0, :9], b[0, :9]) and not np.array_equal(a[0, 14:], b[0, 14:])


def test_blocks_are_lower_triangles_of_each_segment():
    got = np.array(gpt.blocks(mx.array([[0, 0, 1, 1, 2]])))
    assert got.shape == (1, 1, 5, 5)
    want = ["10000", "11000", "00100", "00110", "00001"]
    assert ["".join(str(int(x)) for x in row) for row in got[0, 0]] == want


@pytest.mark.parametrize("attention", [fastmath.attention, plain.attention])
def test_attention_under_a_mask_equals_float64(attention):
    rng = np.random.default_rng(3)
    q, k, v, g = (rng.standard_normal((2, 3, 12, 8)).astype(np.float32) for _ in range(4))
    segments = np.array([[0] * 5 + [1] * 7, [0] * 3 + [1] + [2] * 8])
    allowed = (np.tri(12, dtype=bool) & (segments[:, :, None] == segments[:, None, :]))[:, None]
    scores = np.where(allowed, 0.35 * q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g.astype(np.float64) @ v.astype(np.float64).swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * 0.35
    want = [p @ v, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g]
    values, gradients = mx.vjp(
        lambda *a: attention(*a, 0.35, mx.array(allowed)), [mx.array(a) for a in (q, k, v)], [mx.array(g)]
    )
    for got, expected in zip((*values, *gradients), want, strict=True):
        assert np.abs(np.array(got) - expected).max() <= 2e-6 * np.abs(expected).max()


def traced(ops, outside=True, dtype=mx.float32):
    """A packed step's loss and gradients as a function to audit; `outside`: the lookups outside autograd."""

    def ordinary(w, tokens, scored, positions, segments):
        def loss(w):
            e = gpt.embed(w, tokens[:, :-1], dtype, positions)
            h = gpt.hidden(w, e, CONFIG, ops, segments=segments)
            return objectives.tokens(-ops.cross_entropy(gpt.logits(w, h), tokens[:, 1:]), scored)[0]

        return mx.value_and_grad(loss)(w)

    return (lambda *a: gradient(*a, ops, dtype)) if outside else ordinary


@pytest.mark.parametrize("target", ["metal", "cuda", "cpu"])
def test_the_packed_step_has_no_leak(weights, target):
    lines = arrays(lay_out([rows()[:3], rows()[3:]], CONTEXT))
    ops = ops_for(Backend(target, "deterministic"))
    for dtype in (mx.float32, mx.bfloat16):
        found = audit_targets(traced(ops, dtype=dtype), (weights, *lines), {}, (target,))[target]
        assert found.ok and found.primitives > 200, str(found)


def test_the_audit_sees_a_gathered_position_table(weights):
    """The negative control: MLX's own gradient of both lookups."""
    lines = arrays(lay_out([rows()[:3], rows()[3:]], CONTEXT))
    found = audit_targets(traced(ops_for(Backend("metal", "deterministic")), False), (weights, *lines), {}, ("metal",))
    tables = {f.where for f in found["metal"].findings}
    assert len(tables) == 2 and all(f.rule == "scatter-add" for f in found["metal"].findings), str(found["metal"])
