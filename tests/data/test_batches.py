"""batch(step) is a pure function: of nothing but corpus, settings, seed and step."""

import hashlib
import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest

from mlxdet.data import batches as module
from mlxdet.data.batches import Batch, TextBatches
from mlxdet.data.order import permuted
from mlxdet.data.text import Corpus
from mlxdet.errors import UsageError
from mlxdet.seeds import Splitmix64, stream

ORDERS = ("windows", "epochs")


class Numbered:
    """A corpus of n tokens, token i being i modulo the vocabulary."""

    def __init__(self, n: int, vocab: int = 60_000):
        self.tokens: Any = (np.arange(n) % vocab).astype(np.uint16 if vocab <= 1 << 16 else np.uint32)
        self.vocab_size, self.digest = vocab, ""

    def __len__(self) -> int:
        return len(self.tokens)


def make(corpus: Any, order: str = "windows", **settings: Any) -> TextBatches:
    values = {"context": 16, "batch": 4, "accumulation": 2, "data_seed": 7, "val_fraction": 0.1, "val_windows": 10}
    return TextBatches(corpus, order=order, **(values | settings))


def same(a: Batch, b: Batch) -> bool:
    arrays = np.array_equal(a.rows, b.rows) and np.array_equal(a.tokens, b.tokens)
    return arrays and (a.step, a.digest) == (b.step, b.digest)


def check_save_anywhere(make_batches: Any, steps: int) -> None:
    """Read on from any step in a new object: the rest is what the uninterrupted reader gets, in any order of asking."""
    straight = make_batches()
    whole = [straight.batch(step) for step in range(1, steps + 1)]
    for stop in range(steps):
        again = make_batches()
        assert all(same(again.batch(step), whole[step - 1]) for step in range(stop + 1, steps + 1)), (
            f"from step {stop + 1}"
        )
    jumping, order = make_batches(), list(range(1, steps + 1)) * 2
    random.Random(1).shuffle(order)
    for step in order:
        np.random.random(3)
        jumping.rows(step + 1000)
        assert same(jumping.batch(step), whole[step - 1]), f"step {step} out of order"


@pytest.mark.parametrize("order", ORDERS)
def test_save_anywhere_restore_compare_the_rest(corpus: Corpus, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 40)  # several blocks of 5 steps within the test
    check_save_anywhere(lambda: make(corpus, order), 23)


def test_the_check_sees_a_hidden_state(corpus: Corpus) -> None:
    """Negative control: a generator that is drawn from in sequence."""

    class Sequential(TextBatches):
        def rows(self, step: int, detour: int = 0) -> np.ndarray:
            self.rng = getattr(self, "rng", np.random.default_rng(self.data_seed))
            return self.rng.integers(0, self.positions, 8)

    kw: Any = {"context": 16, "batch": 4, "accumulation": 2, "val_fraction": 0.1, "val_windows": 1}
    with pytest.raises(AssertionError, match="from step 2"):
        check_save_anywhere(lambda: Sequential(corpus, order="windows", data_seed=7, **kw), 5)


@pytest.mark.parametrize("block", [1, 7, 64, 2048])
def test_rows_of_windows_are_the_published_draws(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    data = make(Numbered(1000))
    for step in (1, 2, 3, 17, 256, 257, 1_000_000, 2**40):
        want = Splitmix64(stream(7, "train", step)).integers(8, 900 - 16)
        assert data.rows(step).tolist() == want.tolist()


@pytest.mark.parametrize("tokens", [18, 34, 100, 1000, 5000])  # 1 window per epoch, 2, 5, 56, 281
@pytest.mark.parametrize("block", [1, 64, 2048])
def test_rows_of_epochs_are_the_published_permutation(tokens: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    data = make(Numbered(tokens), "epochs", val_fraction=0.1 if tokens > 200 else 0)
    n, slack = divmod(data.train_tokens - 1, 16)
    for step in (1, 2, 3, 9, 40, 1_000_000, 2**40):
        for row, got in enumerate(data.rows(step)):
            epoch, index = divmod((step - 1) * 8 + row, n)
            offset = Splitmix64(stream(7, "offset", epoch)).random_int(0, slack + 1)
            want = int(permuted(np.array([index]), n, stream(7, "epoch", epoch))[0]) * 16 + offset
            assert got == want, (step, row)


def rows_of_epoch(data: TextBatches, epoch: int) -> np.ndarray:
    first, last = epoch * data.epoch_windows, (epoch + 1) * data.epoch_windows
    per_step = data.shape[0] * data.shape[1]
    steps = range(first // per_step + 1, (last - 1) // per_step + 2)
    rows = np.concatenate([data.rows(step) for step in steps])
    return rows[first % per_step :][: data.epoch_windows]


@pytest.mark.parametrize("tokens", [17, 18, 33, 170, 1000, 1007])
def test_every_epoch_takes_each_window_once_and_all_tokens_are_reached(tokens: int) -> None:
    data = make(Numbered(tokens), "epochs", val_fraction=0.0)
    targets, seen = set(), []
    for epoch in range(120):
        rows = rows_of_epoch(data, epoch)
        ordered = np.sort(rows)
        assert 0 <= ordered[0] <= (tokens - 1) % 16 and ordered[-1] + 17 <= tokens
        assert (np.diff(ordered) == 16).all(), "consecutive windows, context tokens apart"
        targets |= {int(t) for row in (ordered[0], ordered[-1]) for t in range(row + 1, row + 17)}
        seen.append(tuple(rows - ordered[0]))
    everything = set(range(1, tokens)) if data.epoch_windows <= 2 else {*range(1, 17), *range(tokens - 16, tokens)}
    assert everything <= targets
    if data.epoch_windows >= 10:
        assert len(set(seen)) == len(seen), "a new permutation in each epoch"


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_the_windows_at_the_rows(corpus: Corpus, order: str) -> None:
    batch = make(corpus, order).batch(5)
    assert batch.tokens.dtype == np.int32 and batch.tokens.shape == (2, 4, 17)
    assert batch.rows.dtype == np.int64 and batch.rows.shape == (8,)
    for row, got in zip(batch.rows, batch.tokens.reshape(8, 17), strict=True):
        assert np.array_equal(got, corpus.slice(int(row), int(row) + 17))


@pytest.mark.parametrize(("vocab", "width"), [(60_000, "<u2"), (70_000, "<u4")])
def test_digest_is_blake2b_of_rows_and_tokens(vocab: int, width: str) -> None:
    batch = make(Numbered(100_000, vocab)).batch(3)
    raw = batch.rows.astype("<i8").tobytes() + batch.tokens.astype(width).tobytes()
    assert batch.digest == hashlib.blake2b(raw, digest_size=8).hexdigest()


@pytest.mark.parametrize("order", ORDERS)
def test_digest_sees_one_changed_token(order: str) -> None:
    data, other = make(Numbered(1000), order), Numbered(1000)
    other.tokens[data.rows(1)[0] + 16] += 1
    assert make(other, order).batch(1).digest != data.batch(1).digest


@pytest.mark.parametrize("order", ORDERS)
def test_all_64_bits_of_the_seed_count(order: str) -> None:
    seeds = [0, 1, 2, 2**32, 1 + 2**32, 1 + 2**40, 2**63, 2**64 - 1]
    starts = {tuple(make(Numbered(5000), order, data_seed=seed).rows(1)) for seed in seeds}
    assert len(starts) == len(seeds)


def test_epochs_of_neighbouring_seeds_never_coincide() -> None:
    """Where the order of an epoch comes from seed + epoch, epoch 1 of seed 42 is epoch 0 of seed 43."""
    orders = {}
    for seed, epoch in itertools.product(range(40, 46), range(12)):
        rows = rows_of_epoch(make(Numbered(1000), "epochs", data_seed=seed), epoch)
        orders[seed, epoch] = tuple(rows - rows.min())
    assert len(set(orders.values())) == len(orders)
    batches = {
        tuple(make(Numbered(1000), data_seed=seed).rows(step)) for seed in range(40, 46) for step in range(1, 13)
    }
    assert len(batches) == 72


@pytest.mark.parametrize("order", ORDERS)
def test_training_and_validation_share_no_token(order: str) -> None:
    data = make(Numbered(500), order)
    assert (data.train_tokens, data.val_tokens) == (450, 50)
    trained = {int(t) for step in range(1, 1000) for t in np.unique(data.batch(step).tokens)}
    validated = {int(t) for part in data.validation(4) for t in part.ravel()}
    assert max(trained) == 449 and min(validated) == 450
    assert trained == set(range(450)), "and every token of the training part is trained on"


def test_validation_is_the_same_set_whatever_the_batch() -> None:
    data = make(Numbered(5000), val_windows=10)
    parts = {size: data.validation(size) for size in (1, 3, 4, 10, 64)}
    for size, got in parts.items():
        assert all(p.dtype == np.int32 and len(p) <= size for p in got)
        assert np.array_equal(np.concatenate(got), np.concatenate(parts[1]))
    starts = [int(w[0]) for w in np.concatenate(parts[3])]
    assert starts == [4500 + 16 * (i * 31 // 10) for i in range(10)], "31 fit in 500 tokens: 10 of them, evenly spread"
    assert sum(map(len, make(Numbered(5000), val_windows=1000).validation(7))) == 31
    other = make(Numbered(5000), "epochs", data_seed=99, batch=1, accumulation=1, val_windows=10).validation(4)
    assert np.array_equal(np.concatenate(other), np.concatenate(parts[1])), "no seed and no order in it"


def test_no_validation() -> None:
    data = make(Numbered(17), val_fraction=0.0)
    assert (data.train_tokens, data.val_tokens, data.validation(4)) == (17, 0, [])


@pytest.mark.parametrize("order", ORDERS)
def test_context_plus_one_tokens_are_enough(order: str) -> None:
    batch = make(Numbered(17), order, val_fraction=0.0).batch(3)
    assert batch.rows.tolist() == [0] * 8 and np.array_equal(batch.tokens[1, 3], np.arange(17))


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_too_short_a_text_is_refused_with_both_numbers(tokens: int, fraction: float) -> None:
    with pytest.raises(UsageError, match=f"context of 16 needs at least 17 tokens, it has {tokens};"):
        make(Numbered(tokens), val_fraction=fraction)


def test_too_short_a_part_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        UsageError, match=r"validation part .* at least 17 tokens, it has 16 of 169; .*0 turns validation off"
    ):
        make(Numbered(169))
    assert make(Numbered(170)).val_tokens == 17
    with pytest.raises(
        UsageError, match=r"training part .* at least 17 tokens, it has 16 of 32; change --val-fraction 0.5"
    ):
        make(Numbered(32), val_fraction=0.5)
    with pytest.raises(UsageError, match="validation part"):
        make(Numbered(100), val_fraction=1e-9)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [({"order": "shuffled"}, "--order"), ({"batch": 0}, "--batch"), ({"val_fraction": 1.0}, "--val-fraction")],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        make(Numbered(1000), **({"order": "windows"} | wrong))


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        make(Numbered(100), val_fraction=0.0).batch(0)


@pytest.mark.parametrize("order", ORDERS)
def test_many_threads_on_one_object_get_the_same(corpus: Corpus, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)  # blocks of two steps: the remembered one is replaced all the time
    want = {step: make(corpus, order).batch(step) for step in range(1, 40)}
    shared, wrong = make(corpus, order), []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            step = rng.randrange(1, 40)
            if not same(shared.batch(step), want[step]):
                wrong.append(step)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
