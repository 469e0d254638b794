"""Each embedding gradient against a float64 sum, and what it promises about order, accuracy and bounds."""

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.model.embedding import METHODS, limbs, segment_sum

DETERMINISTIC = ["onehot", "fixedpoint", "doubling"]


def exact(ids, grad, vocab):
    out = np.zeros((vocab, grad.shape[-1]))
    np.add.at(out, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).astype(np.float64))
    return out


def zipf(rng, vocab, n):
    p = 1.0 / np.arange(1, vocab + 1)
    return rng.choice(vocab, n, p=p / p.sum()).astype(np.int32)


def as_numpy(a):
    return np.array(a.astype(mx.float32))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab, shape", [(256, (4, 33)), (5000, (2, 700)), (8, (10, 32)), (3, (1, 1)), (40, (1, 2))])
def test_it_is_the_sum_over_equal_ids(backend, method, vocab, shape):
    rng = np.random.default_rng(0)
    ids, grad = zipf(rng, vocab, shape), rng.standard_normal((*shape, 24)).astype(np.float32)
    got = segment_sum(method, mx.array(ids), mx.array(grad), vocab)
    assert got.dtype == mx.float32 and got.shape == (vocab, 24)
    want = exact(ids, grad, vocab)
    bound = {"fixedpoint": 1e-7, "doubling": 4e-7}.get(method, 4e-6)
    assert np.abs(as_numpy(got) - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_addends_are_added_in_float32(backend, method):
    rng = np.random.default_rng(1)
    ids = zipf(rng, 100, (4096,))
    grad = mx.array(rng.standard_normal((4096, 16)).astype(np.float32)).astype(mx.bfloat16)
    want = exact(ids, as_numpy(grad), 100)
    error = np.abs(as_numpy(segment_sum(method, mx.array(ids), grad, 100)) - want).max() / np.abs(want).max()
    in_bfloat16 = mx.zeros((100, 16), mx.bfloat16).at[mx.array(ids)].add(grad)
    ordinary = np.abs(as_numpy(in_bfloat16) - want).max() / np.abs(want).max()
    assert error < 3e-6 < 1e-2 < ordinary


def test_fixedpoint_does_not_depend_on_the_order_of_the_tokens_and_others_do(backend):
    rng = np.random.default_rng(2)
    ids, grad = zipf(rng, 300, (2000,)), rng.standard_normal((2000, 8)).astype(np.float32)
    order = rng.permutation(2000)

    def moved(method):
        a = segment_sum(method, mx.array(ids), mx.array(grad), 300)
        b = segment_sum(method, mx.array(ids[order]), mx.array(grad[order]), 300)
        return not np.array_equal(np.array(a), np.array(b))

    assert not moved("fixedpoint")
    assert moved("scatter")  # the negative control: float addition in the order of the tokens


def test_a_rare_token_keeps_its_accuracy_beside_a_huge_one(backend):
    ids = np.array([0] * 50 + [1] * 3 + [2] * 2, np.int32)
    grad = np.random.default_rng(3).standard_normal((55, 8)).astype(np.float32)
    grad[:50] *= 1e6
    grad[50:53] *= 1e-9
    grad[53:] *= 1e-30
    got = as_numpy(segment_sum("fixedpoint", mx.array(ids), mx.array(grad), 4))
    want = exact(ids, grad, 4)
    for row in range(3):
        assert (
            np.abs(got[row] - want[row]).max()
            <= 2.0**-31 * np.abs(grad[ids == row]).max() + 1e-7 * np.abs(want[row]).max()
        )
    assert np.all(got[3] == 0)


@pytest.mark.parametrize("method", DETERMINISTIC)
def test_a_non_finite_gradient_is_not_swallowed(backend, method):
    for bad in (np.nan, np.inf, -np.inf):
        grad = np.ones((4, 2), np.float32)
        grad[1, 0] = bad
        got = as_numpy(segment_sum(method, mx.array([0, 1, 1, 2]), mx.array(grad), 3))
        assert not np.isfinite(got[1, 0])


def test_extreme_sizes_survive_fixed_point(backend):
    for scale in (1e-38, 1e-45, 3e38, 1.0):
        grad = np.array([[1.0, -1.0], [0.5, 0.25]], np.float32) * np.float32(scale)
        got = as_numpy(segment_sum("fixedpoint", mx.array([0, 1]), mx.array(grad), 2))
        np.testing.assert_allclose(got, grad, rtol=2e-7, atol=1.2e-38)


def test_limbs_never_overflow_and_always_hold_enough_bits():
    for n in (1, 2, 8192, 8193, 1 << 14, 1 << 20, 1 << 26):
        bits, count = limbs(n)
        assert n * (1 << bits) <= 1 << 30 and bits * count >= 32
    with pytest.raises(ValueError, match="too many"):
        limbs((1 << 26) + 1)


def test_many_equal_ids_do_not_overflow(backend):
    n = 20_000
    grad = np.full((n, 1), 0.999, np.float32)
    got = as_numpy(segment_sum("fixedpoint", mx.array(np.zeros(n, np.int32)), mx.array(grad), 2))
    assert got[0, 0] == pytest.approx(n * float(np.float32(0.999)), rel=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_twenty_repetitions_are_one(backend, method):
    rng = np.random.default_rng(4)
    ids, grad = (
        mx.array(rng.integers(0, 8, (10, 32)).astype(np.int32)),
        mx.array(rng.standard_normal((10, 32, 16)).astype(np.float32)),
    )
    assert len({np.array(segment_sum(method, ids, grad, 8)).tobytes() for _ in range(20)}) == 1
