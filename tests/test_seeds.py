"""The four promises of the original contract, the published vectors, and independence of the streams."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdet.errors import UsageError
from mlxdet.seeds import MASK64, BatchRng, Splitmix64, batch_rng, parse_seed, seed_everything, stream

U64 = st.integers(0, MASK64)


def sequence(seed, n=16):
    rng = BatchRng(seed)
    return [rng.next() for _ in range(n)]


def test_same_seed_same_sequence():
    assert sequence(1234) == sequence(1234)


def test_different_seeds_different_sequence():
    assert sequence(1234) != sequence(1235)
    assert sequence(0) != sequence(1)


def test_reset_clears_state():
    rng = BatchRng(9)
    first = rng.next()
    rng.next()
    rng.reset()
    with pytest.raises(RuntimeError, match="no seed"):
        rng.next()
    with pytest.raises(RuntimeError, match="no seed"):
        rng.at("train", 1)
    rng.seed(9)
    assert rng.next() == first


def test_splitmix64_matches_published_bits():
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    rng = Splitmix64(1234567)
    assert [rng.next() for _ in range(5)] == published
    assert Splitmix64(1234567).draws(5).tolist() == published
    of_42 = [0xBDD732262FEB6E95, 0x28EFE333B266F103, 0x47526757130F9F52, 0x581CE1FF0E4AE394]
    assert [Splitmix64(42).at(n) for n in range(4)] == of_42
    assert Splitmix64(42).integers(8, 1000).tolist() == [741, 159, 278, 344, 38, 868, 218, 800]
    rng = BatchRng(7)
    assert [rng.random_int(10, 20) for _ in range(8)] == [13, 10, 19, 15, 14, 12, 14, 13]


@given(U64, st.integers(0, 40), st.integers(1, 1 << 63))
def test_vectorised_draws_equal_single_ones(seed, n, below):
    single, many = Splitmix64(seed), Splitmix64(seed)
    assert [(single.next() * below) >> 64 for _ in range(n)] == many.integers(n, below).tolist()
    assert single.state == many.state


def test_integers_are_uniform():
    counts = np.bincount(Splitmix64(3).integers(70_000, 7), minlength=7)
    chi2 = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi2 < 22.5  # 6 degrees of freedom, p = 0.001


@pytest.mark.parametrize("low, high", [(3, 3), (4, 3), (0, 1 << 64)])
def test_empty_or_too_wide_range_is_refused(low, high):
    with pytest.raises(ValueError, match="empty or wider"):
        Splitmix64(1).random_int(low, high)


@pytest.mark.parametrize("value, number", [(0, 0), ("0", 0), (MASK64, MASK64), (str(MASK64), MASK64), ("007", 7)])
def test_seeds_that_are(value, number):
    assert parse_seed(value) == number


@pytest.mark.parametrize(
    "value", [-1, MASK64 + 1, "-1", str(MASK64 + 1), "1e3", "", " 1", "1 ", "+1", "0x1", "١", "abc", True, False, None, 1.0,
              float("nan"), b"1", [1], "1" * 5000],
)  # fmt: skip
def test_anything_else_is_one_clear_error(value):
    with pytest.raises(UsageError) as caught:
        parse_seed(value, "--data-seed")
    assert str(caught.value).startswith("--data-seed: ") and "\n" not in str(caught.value)


@given(U64, U64)
def test_all_64_bits_of_a_seed_reach_a_stream(a, b):
    assert (stream(a, "train", 1) == stream(b, "train", 1)) == (a == b)


def test_neighbouring_seeds_steps_and_names_share_nothing():
    keys = [
        stream(seed, name, *counters)
        for seed in (0, 1, 42, 43, 1 << 32, (1 << 32) + 1, MASK64)
        for name in ("train", "epoch", "dropout")
        for counters in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (MASK64,)]
    ]
    assert len(set(keys)) == len(keys)
    assert stream(1, "ab", 1) != stream(1, "a", ord("b"), 1)


def test_streams_are_pinned():
    # From hashlib alone, over the encoding that the docstring states.
    assert stream(0, "") == 0x1FB0B259359CF224
    assert stream(7, "train", 3) == 0x8DADEEBD4290BF69


def test_indexed_draws_do_not_move_the_sequence():
    rng = BatchRng(5)
    expected = sequence(5, 3)
    got = []
    for _ in range(3):
        rng.at("train", 1).next()
        got.append(rng.next())
    assert got == expected
    assert rng.at("train", 2).draws(4).tolist() == BatchRng(5).at("train", 2).draws(4).tolist()
    assert rng.at("train", 2).next() != rng.at("train", 3).next()


def test_state_can_be_saved_and_restored():
    rng = BatchRng(11)
    rng.next()
    state = rng.get_state()
    rest = [rng.next() for _ in range(5)]
    other = BatchRng()
    other.set_state(state)
    assert [other.next() for _ in range(5)] == rest
    assert other.at("x", 1).next() == rng.at("x", 1).next()


def test_threads_share_one_sequence_without_losing_a_draw():
    rng, drawn = BatchRng(3), []
    threads = [threading.Thread(target=lambda: drawn.extend(rng.next() for _ in range(500))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(drawn) == sorted(sequence(3, 4000))


def test_seed_everything_seeds_mlx_and_the_batch_generator(backend):
    import mlx.core as mx

    def draw():
        return batch_rng.next(), mx.random.uniform(shape=(3,)).tolist()

    seen = {}
    for seed in (5, 6, 5, 5 + (1 << 40)):
        seed_everything(seed)
        seen.setdefault(seed, []).append(draw())
    assert seen[5][0] == seen[5][1]
    for a, b in itertools.combinations([seen[5][0], seen[6][0], seen[5 + (1 << 40)][0]], 2):
        assert a[0] != b[0] and a[1] != b[1]
    for bad in (True, -1, 1.0, "x"):
        with pytest.raises(UsageError):
            seed_everything(bad)


def test_the_same_in_every_process_whatever_the_hash_seed():
    code = "from mlxdet.seeds import *; print(stream(3, 'train', 9), Splitmix64(3).draws(3).tolist())"
    said = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": h, "PATH": ""}, capture_output=True).stdout
        for h in ("0", "1", "4242")
    }
    assert len(said) == 1 and said != {b""}
