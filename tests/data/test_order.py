"""The order is a pure function of (key, index). Expected values: scalar Python, counting, and constants."""

import math

import numpy as np
import pytest

from mlxdet.data.order import ROUNDS, permuted, windows
from mlxdet.seeds import Splitmix64, stream

KEYS = np.array([0, 1, 42, 2**63, 2**64 - 1, stream(7, "train", 1)], np.uint64)


@pytest.mark.parametrize("positions", [1, 2, 1000, 2**32 - 1, 2**32, 2**32 + 1, 10**12, 2**63])
def test_windows_are_the_draws_of_splitmix64(positions: int) -> None:
    got = windows(KEYS, 9, positions)
    assert got.dtype == np.int64 and got.shape == (len(KEYS), 9)
    for key, row in zip(KEYS, got, strict=True):
        rng = Splitmix64(int(key))
        assert row.tolist() == [rng.random_int(0, positions) for _ in range(9)]


def test_windows_of_seed_42_are_pinned() -> None:
    assert windows(np.array([42], np.uint64), 8, 1000).tolist() == [[741, 159, 278, 344, 38, 868, 218, 800]]


def chi_square(counts: np.ndarray, expected: float) -> float:
    """Distance from a uniform count in standard deviations of the chi-square distribution."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("positions", [1, 2, 7, 100, 1000])
def test_windows_reach_every_position_equally_often(positions: int) -> None:
    keys = np.array([stream(3, "train", step) for step in range(1, 2001)], np.uint64)
    counts = np.bincount(windows(keys, 50, positions).ravel(), minlength=positions)
    assert counts.size == positions and counts.min() > 0
    if positions > 1:
        assert abs(chi_square(counts, keys.size * 50 / positions)) < 5


def test_chi_square_sees_a_position_that_is_never_drawn() -> None:
    """Negative control: the fault of leaving out the last position."""
    keys = np.array([stream(3, "train", step) for step in range(1, 2001)], np.uint64)
    counts = np.bincount(windows(keys, 50, 999).ravel(), minlength=1000)
    assert chi_square(counts, 100.0) > 2.0 and counts.min() == 0


def scalar_permuted(index: int, n: int, key: int) -> int:
    """The definition, one number at a time."""
    rng = Splitmix64(key)
    sizes = (math.isqrt(n - 1) + 1, -(-n // (math.isqrt(n - 1) + 1)))
    while True:
        halves = [index // sizes[1], index % sizes[1]]
        for i in range(ROUNDS):
            to = i % 2
            draw = rng.at(i * 2**32 + halves[1 - to]) >> 32
            halves[to] = (halves[to] + (draw * sizes[to] >> 32)) % sizes[to]
        index = halves[0] * sizes[1] + halves[1]
        if index < n:
            return index


@pytest.mark.parametrize("n", [1, 2, 3, 17, 256, 1000, 10**9 + 7, 2**40 - 1, 2**62])
def test_permuted_is_its_definition(n: int) -> None:
    index = np.unique([0, n - 1, n // 2, n // 3, *windows(np.array([5], np.uint64), 20, n)[0]])
    for key in (0, 1, 2**64 - 1):
        assert permuted(index, n, key).tolist() == [scalar_permuted(int(i), n, key) for i in index]


def test_permuted_is_a_permutation_for_every_small_n() -> None:
    for n in range(1, 401):
        for key in (0, n, 2**64 - n):
            assert np.array_equal(np.sort(permuted(np.arange(n), n, key)), np.arange(n)), n


@pytest.mark.parametrize("n", [10**6, 2**33 + 5])
def test_permuted_never_meets_itself_in_a_large_range(n: int) -> None:
    index = np.unique(windows(np.array([8], np.uint64), 200_000, n)[0])
    places = permuted(index, n, 99)
    assert np.unique(places).size == index.size and places.min() >= 0 and places.max() < n
    tenths = np.bincount(places * 10 // n, minlength=10)
    assert abs(chi_square(tenths, index.size / 10)) < 5


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_permuted_gives_every_permutation_equally_often(n: int) -> None:
    keys = np.array([stream(1, "epoch", epoch) for epoch in range(20_000)], np.uint64)
    places = permuted(np.tile(np.arange(n), (keys.size, 1)), n, np.repeat(keys[:, None], n, axis=1))
    _, counts = np.unique(places @ (n ** np.arange(n)), return_counts=True)
    assert counts.size == math.factorial(n)
    assert abs(chi_square(counts, keys.size / counts.size)) < 5


def test_permuted_takes_a_key_for_each_index() -> None:
    keys = np.array([3, 4, 5], np.uint64)
    together = permuted(np.tile(np.arange(50), (3, 1)), 50, np.repeat(keys[:, None], 50, axis=1))
    assert [row.tolist() for row in together] == [permuted(np.arange(50), 50, int(key)).tolist() for key in keys]
    assert len({tuple(row) for row in together}) == 3


def test_permuted_of_key_1_is_pinned() -> None:
    assert permuted(np.arange(10), 10, 1).tolist() == PINNED_10
    assert permuted(np.arange(5), 10**9, 1).tolist() == PINNED_1E9


def test_out_of_range_is_refused() -> None:
    for index, n in ((np.array([-1]), 5), (np.array([5]), 5), (np.array([0]), 0), (np.array([0]), 2**62 + 1)):
        with pytest.raises(ValueError, match="permuted"):
            permuted(index, n, 1)
    for positions in (0, -1, 2**63 + 1):
        with pytest.raises(ValueError, match="positions"):
            windows(KEYS, 1, positions)


PINNED_10 = [4, 6, 7, 2, 5, 1, 8, 3, 9, 0]
PINNED_1E9 = [856828778, 635661534, 380250163, 898209144, 870902981]
