"""The lookup has the bits of MLX's; its gradient is the float64 sum, more exactly than MLX's, and the same every time."""

import secrets

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxdet
from mlxdet.measure.repeatable import NotRepeatable
from mlxdet.nn import Embedding, lookup

TABLES = [(256, 48, 2000), (32_000, 8, 3000)]


def zipf(rng, vocab, shape):
    p = 1.0 / np.arange(1, vocab + 1)
    return rng.choice(vocab, shape, p=p / p.sum()).astype(np.int32)


def exact(ids, grad, vocab):
    out = np.zeros((vocab, grad.shape[-1]))
    np.add.at(out, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).astype(np.float64))
    return out


def wide(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def gradient(rows, table, ids, cotangent):
    return mx.grad(lambda t: (rows(t, ids) * cotangent).sum())(table)


def ordinary(table, ids):
    return table[ids]


def case(vocab, width, n, dtype=mx.float32, seed=0):
    rng = np.random.default_rng(seed)
    table = mx.array(rng.standard_normal((vocab, width)).astype(np.float32)).astype(dtype)
    cotangent = mx.array(rng.standard_normal((4, n // 4, width)).astype(np.float32)).astype(dtype)
    return table, mx.array(zipf(rng, vocab, (4, n // 4))), cotangent


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2,), (3,), (7, 1), (2, 3, 5), (64,), (65,)])
def test_values_have_the_bits_of_mlx(backend, dtype, shape):
    rng = np.random.default_rng(1)
    table = mx.array(rng.standard_normal((9, 3)).astype(np.float32)).astype(dtype)
    table[4] = mx.array([float("nan"), float("inf"), -0.0], dtype)
    ids = mx.array(rng.integers(-9, 9, shape).astype(np.int32))
    got, want = lookup(table, ids), table[ids]
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    code = mx.uint32 if dtype == mx.float32 else mx.uint16
    assert np.array_equal(np.array(got.view(code)), np.array(want.view(code)))


@pytest.mark.parametrize("kind", [mx.uint8, mx.int8, mx.uint16, mx.int64, mx.uint32])
def test_any_integers_are_ids_and_nothing_else(backend, kind):
    table = mx.random.normal((100, 2))
    ids = mx.array([99, 0, 99, 3]).astype(kind)
    assert mx.array_equal(lookup(table, ids), table[mx.array([99, 0, 99, 3])])
    with pytest.raises(ValueError, match="integers"):
        lookup(table, mx.array([1.0, 2.0]))


def test_tables_of_any_rank(backend):
    ids = mx.array([[1, 0, 1], [3, 3, 3]])
    for shape in ((4,), (4, 2, 3)):
        table = mx.random.normal(shape)
        assert mx.array_equal(lookup(table, ids), table[ids])


@pytest.mark.parametrize("vocab, width, n", TABLES)
def test_float32_gradients_are_those_of_mlx_to_a_millionth(backend, vocab, width, n):
    table, ids, cotangent = case(vocab, width, n)
    got = wide(gradient(lookup, table, ids, cotangent))
    want = exact(np.array(ids), np.array(cotangent), vocab)
    assert relative(got, wide(gradient(ordinary, table, ids, cotangent))) < 1e-6
    assert np.abs(got - want).max() < 3e-7 * np.abs(want).max()


@pytest.mark.parametrize("dtype, gain", [(mx.bfloat16, 3), (mx.float16, 3)])
@pytest.mark.parametrize("vocab, width, n", TABLES)
def test_half_precision_gradients_are_closer_to_float64_than_mlx(backend, vocab, width, n, dtype, gain):
    table, ids, cotangent = case(vocab, width, n, dtype)
    want = exact(np.array(ids), wide(cotangent), vocab)
    got = gradient(lookup, table, ids, cotangent)
    assert got.dtype == dtype
    mine, mlx = (relative(wide(g), want) for g in (got, gradient(ordinary, table, ids, cotangent)))
    assert mine < mx.finfo(dtype).eps / 2  # one rounding
    assert gain * mine < mlx


@pytest.mark.parametrize("n", [2, 3, 4, 5, 31, 32, 33, 100])
def test_one_id_many_times(backend, n):
    cotangent = mx.arange(1, n + 1)[:, None] * mx.ones((n, 2))
    got = gradient(lookup, mx.zeros((3, 2)), mx.full((n,), 1, mx.int32), cotangent)
    assert np.array_equal(np.array(got), [[0, 0], [n * (n + 1) / 2] * 2, [0, 0]])


def test_negative_ids_add_to_the_row_they_mean(backend):
    got = gradient(lookup, mx.zeros((3, 1)), mx.array([-1, 2, 0, -3, 2]), mx.array([[1.0], [2], [4], [8], [16]]))
    assert np.array(got)[:, 0].tolist() == [12, 0, 19]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_swallowed(backend, bad):
    got = np.array(gradient(lookup, mx.zeros((3, 1)), mx.array([0, 1, 1, 2]), mx.array([[1.0], [2], [bad], [3]])))
    assert not np.isfinite(got[1, 0])


def test_compiled_and_eager_give_the_same_here(backend):
    table, ids, cotangent = case(20, 8, 40)

    def step(t):
        return gradient(lookup, t, ids, cotangent)

    assert relative(wide(mx.compile(step)(table)), wide(step(table))) < 1e-6


def test_recomputed_in_the_backward_pass_it_gives_the_same_bits(backend):
    table, ids, cotangent = case(20, 8, 40)
    assert mx.array_equal(
        gradient(mx.checkpoint(lookup), table, ids, cotangent), gradient(lookup, table, ids, cotangent)
    )


def test_a_graph_without_shapes_is_refused_not_wrong(backend):
    with pytest.raises(ValueError, match="output shapes"):
        mx.compile(lookup, shapeless=True)(mx.zeros((5, 2)), mx.array([1, 2, 1]))


def test_the_drop_in_is_the_layer(backend):
    mx.random.seed(3)
    want = nn.Embedding(50, 64)
    mx.random.seed(3)
    layer = Embedding(50, 64)
    assert isinstance(layer, nn.Embedding) and mx.array_equal(layer.weight, want.weight)
    ids, x = mx.array([[1, 2], [49, 1]]), mx.random.normal((2, 64))
    assert mx.array_equal(layer(ids), want(ids)) and mx.array_equal(layer(3), want(3))
    assert mx.array_equal(layer.as_linear(x), want.as_linear(x))
    assert isinstance(layer.to_quantized(32, 4), nn.QuantizedEmbedding)
    assert repr(layer) == repr(want) and list(layer.parameters()) == ["weight"]


def test_a_tied_head_gets_both_gradients(backend):
    ids, x = mx.array([1, 2, 1, 1]), mx.random.normal((4, 8))
    plain = nn.Embedding(6, 8)
    layer = Embedding(6, 8)
    layer.weight = plain.weight

    def loss(module):
        return nn.losses.cross_entropy(module.as_linear(module(ids) * x), ids, reduction="mean")

    mine, mlx = (nn.value_and_grad(m, loss)(m)[1]["weight"] for m in (layer, plain))
    assert relative(wide(mine), wide(mlx)) < 1e-6


def test_twenty_gradients_are_one_and_a_race_is_seen(backend):
    table, ids, cotangent = case(40, 16, 400)
    assert mlxdet.assert_repeatable(gradient, lookup, table, ids, cotangent).identical == 20

    def racing(t, i):
        """The rows added up in another order at each call, as float atomics do it."""
        flat = i.reshape(-1)
        order = mx.random.permutation(flat.size, key=mx.array([secrets.randbits(32), secrets.randbits(32)], mx.uint32))
        return t[flat[order]][mx.argsort(order)].reshape(*i.shape, -1)

    with pytest.raises(NotRepeatable):
        mlxdet.assert_repeatable(gradient, racing, table, ids, cotangent)
