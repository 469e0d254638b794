"""Batches of rows are a pure function of (seed, step), padded or packed, for every kind of corpus."""

import hashlib
import itertools
import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxdet.data import packing as module
from mlxdet.data.batches import Prefetcher
from mlxdet.data.packing import RecordBatch, RecordBatches, best_fit, bucket, lay_out
from mlxdet.data.records import KINDS, RecordCorpus
from mlxdet.data.templates import Tokens
from mlxdet.errors import UsageError

CASES = [("io", False), ("io", True), ("sft", False), ("sft", True), ("preference", False)]
CONTEXT = 40


def row(kind: str, i: int) -> dict[str, Any]:
    asked, answer = f"{i}" + "?" * (i * 7 % 11), "x" * (i * i % 17 + 1)
    if kind == "io":
        return {"input": asked, "output": answer}
    if kind == "sft":
        turns = [asked, answer] * (1 + i % 2)
        roles = ["user", "assistant"] * (1 + i % 2)
        return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}
    return {"prompt": asked, "chosen": answer, "rejected": "y" * (i % 5 + 1)}


def corpus(folder: Path, kind: str, n: int = 37, **settings: Any) -> RecordCorpus:
    path = folder / f"{kind}-{n}.jsonl"
    path.write_text("".join(json.dumps(row(kind, i)) + "\n" for i in range(n)))
    return KINDS[kind]([str(path)], **({"template": "plain", "context": CONTEXT, "truncate": True} | settings))


def batches(data: RecordCorpus, packing: bool, **settings: Any) -> RecordBatches:
    values = {"batch": 3, "accumulation": 2, "data_seed": 7, "val_fraction": 0.0, "val_windows": 10}
    return RecordBatches(data, packing=packing, **(values | settings))


def same(a: RecordBatch, b: RecordBatch) -> bool:
    names = ("tokens", "scored", "positions", "segments", "rows", "spans")
    equal = all(
        (getattr(a, n) is None and getattr(b, n) is None) or np.array_equal(getattr(a, n), getattr(b, n)) for n in names
    )
    return equal and (a.step, a.digest) == (b.step, b.digest)


def check_save_anywhere(make: Any, steps: int) -> None:
    """Read on from any step in a new object: the rest is what the uninterrupted reader gets, in any order of asking."""
    straight = make()
    whole = [straight.batch(step) for step in range(1, steps + 1)]
    for stop in range(0, steps, 3):
        again = make()
        assert all(same(again.batch(step), whole[step - 1]) for step in range(stop + 1, steps + 1)), (
            f"from step {stop + 1}"
        )
    jumping, order = make(), list(range(1, steps + 1)) * 2
    random.Random(1).shuffle(order)
    for step in order:
        np.random.random(3)
        jumping.rows(step + 1000)
        assert same(jumping.batch(step), whole[step - 1]), f"step {step} out of order"


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_save_anywhere_restore_compare_the_rest(kind: str, packing: bool, tmp_path: Path) -> None:
    data = corpus(tmp_path, kind)
    check_save_anywhere(lambda: batches(data, packing), 17)


def test_the_check_sees_a_hidden_state(tmp_path: Path) -> None:
    """Negative control: an order that is drawn in sequence."""

    class Sequential(RecordBatches):
        def samples(self, step: int, detour: int = 0) -> list[list[int]]:
            self.rng = getattr(self, "rng", np.random.default_rng(self.data_seed))
            return [[int(i)] for i in self.rng.integers(0, self.train_rows, 6)]

    data = corpus(tmp_path, "io")
    kw: Any = {"batch": 3, "accumulation": 2, "data_seed": 7, "val_fraction": 0.0, "val_windows": 10}
    with pytest.raises(AssertionError, match="from step"):
        check_save_anywhere(lambda: Sequential(data, packing=False, **kw), 5)


def once_per_epoch(rows: list[int], n: int) -> bool:
    epochs = [rows[i : i + n] for i in range(0, len(rows) - n + 1, n)]
    return all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == n for epoch in epochs)


@pytest.mark.parametrize(("kind", "packing"), CASES)
@pytest.mark.parametrize("n", [1, 2, 5, 6, 37, 60])
@pytest.mark.parametrize("pool", [1, 64])
def test_each_row_once_per_epoch(kind: str, packing: bool, n: int, pool: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Across ragged ends, in a run that is stopped and taken up again after each step."""
    monkeypatch.setattr(module, "POOL", pool)
    data = corpus(tmp_path, kind, n)
    steps = 5 * n // 6 + 2 if not packing else 4 * batches(data, True).epoch_windows // 6 + 2
    got = [int(r) for step in range(1, steps + 1) for r in batches(data, packing).rows(step)]
    assert len(got) >= 4 * n or packing
    assert once_per_epoch(got, n)
    if n > 6:
        assert got[:n] != got[n : 2 * n], "in another order each time"


def test_once_per_epoch_sees_a_row_that_comes_twice() -> None:
    assert once_per_epoch([2, 0, 1, 1, 2, 0], 3)
    assert not once_per_epoch([2, 0, 1, 1, 1, 0], 3) and not once_per_epoch([2, 0, 2, 2, 0, 2], 3)


def test_stop_and_resume_five_times_gives_the_rows_of_one_run(tmp_path: Path) -> None:
    data = corpus(tmp_path, "io")
    with Prefetcher(batches(data, True).batch, 1, 11, depth=0) as whole:
        want = [b.rows.tolist() for b in whole]
    got = []
    for start in range(1, 11, 2):  # each time in a new object, with batches made ahead and thrown away
        with Prefetcher(batches(data, True).batch, start, 11, depth=4) as ahead:
            got += [next(ahead).rows.tolist(), next(ahead).rows.tolist()]
    assert got == want


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_lines_hold_the_rows_they_name(kind: str, packing: bool, tmp_path: Path) -> None:
    data = corpus(tmp_path, kind)
    source = batches(data, packing)
    number = {int(row): i for i, row in enumerate(data.kept)}
    for step in (1, 2, 9, 1000):
        batch = source.batch(step)
        length = batch.tokens.shape[2] - 1
        assert batch.tokens.shape == (2, 3 * data.sides, length + 1) and batch.tokens.dtype == np.int32
        assert batch.scored.shape == (2, 3 * data.sides, length) and batch.scored.dtype == bool
        assert np.array_equal(batch.rows, source.rows(step)) and batch.rows.dtype == np.int64
        tokens, scored = batch.tokens.reshape(-1, length + 1), batch.scored.reshape(-1, length)
        want_tokens, want_scored = np.zeros_like(tokens), np.zeros_like(scored)
        assert len(batch.spans) == len(batch.rows) * data.sides
        per_line: dict[int, list[tuple[int, int]]] = {}
        for line, start, stop in batch.spans.tolist():
            per_line.setdefault(line, []).append((start, stop))
        order = iter(batch.rows.tolist())
        groups = [range(m * 3, m * 3 + 3) for m in range(2)]
        for m, group in enumerate(groups):
            for k in group:
                first = per_line[k if data.sides == 1 else m * 6 + k - m * 3]
                for j, (start, stop) in enumerate(first):
                    sides = data.sample(number[next(order)])
                    for side, part in enumerate(sides):
                        line = k if data.sides == 1 else m * 6 + side * 3 + k - m * 3
                        assert per_line[line][j] == (start, start + len(part.ids)) and (
                            side or stop - start == len(part.ids)
                        )
                        want_tokens[line, start : start + len(part.ids)] = part.ids
                        want_scored[line, start : start + len(part.ids) - 1] = part.scored[1:]
        assert np.array_equal(tokens, want_tokens) and np.array_equal(scored, want_scored)
        assert scored.any(axis=1).all(), "no line without a scored token"


def test_a_layout_by_hand() -> None:
    """Two rows side by side, ids and masks written out; a second line with one row that fills it."""
    a = Tokens(np.array([10, 11, 12, 13]), np.array([0, 0, 1, 1], bool))
    b = Tokens(np.array([20, 21, 22]), np.array([0, 1, 1], bool))
    c = Tokens(np.arange(30, 39), np.array([0] * 8 + [1], bool))
    got = lay_out([[a, b], [c]], 8)
    assert got.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22, 0, 0], [30, 31, 32, 33, 34, 35, 36, 37, 38]]
    assert got.scored.astype(int).tolist() == [[0, 1, 1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]]
    assert got.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert got.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2], [0] * 8]
    assert got.spans.tolist() == [[0, 0, 4], [0, 4, 7], [1, 0, 9]]
    filled = lay_out([[a, b, Tokens(np.array([40, 41]), np.array([1, 1], bool))]], 8)
    assert filled.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22, 40, 41]]
    assert filled.scored.astype(int).tolist() == [[0, 1, 1, 0, 1, 1, 0, 1]], "40 has nothing before it, marked or not"
    assert filled.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]] and filled.positions[0, 7] == 0
    almost = lay_out([[a, b, Tokens(np.array([40]), np.array([1], bool))]], 7)  # its only token is the last target
    assert almost.scored.astype(int).tolist() == [[0, 1, 1, 0, 1, 1, 0]]
    with pytest.raises(ValueError, match="line 0 has 10 tokens, more than 9"):
        lay_out([[c, Tokens(np.array([1]), np.array([False]))]], 8)


@pytest.mark.parametrize("kind", ["io", "sft"])
def test_packed_masks_never_cross_rows(kind: str, tmp_path: Path) -> None:
    """A scored target lies in the segment of its input; positions count from the row's first token."""
    data = corpus(tmp_path, kind)
    for step in range(1, 12):
        batch = batches(data, True).batch(step)
        assert batch.segments is not None and batch.positions is not None
        assert batch.tokens.shape[2] == CONTEXT + 1
        for line in range(6):
            segment = np.concatenate([batch.segments.reshape(6, -1)[line], [-1]])
            spans = [(a, b) for i, a, b in batch.spans.tolist() if i == line]
            owner = np.full(CONTEXT + 1, len(spans))
            for k, (start, stop) in enumerate(spans):
                owner[start:stop] = k
            assert np.array_equal(segment[:-1], owner[:-1])
            for at in np.flatnonzero(batch.scored.reshape(6, -1)[line]):
                assert owner[at] == owner[at + 1] < len(spans)
            starts = [0, *[b for _, b in spans]]
            want = [at - max(s for s in starts if s <= at) for at in range(CONTEXT)]
            assert batch.positions.reshape(6, -1)[line].tolist() == want
            assert [a for a, _ in spans] == starts[: len(spans)], "side by side"


def test_digest_is_blake2b_of_rows_spans_tokens_and_mask(tmp_path: Path, model: Path) -> None:
    for tokenizer, width in ((None, "<u1"), (str(model), "<u2")):
        batch = batches(corpus(tmp_path, "sft", tokenizer=tokenizer), True).batch(3)
        raw = batch.rows.astype("<i8").tobytes() + batch.spans.astype("<i8").tobytes()
        raw += batch.tokens.astype(width).tobytes() + batch.scored.tobytes()
        assert batch.digest == hashlib.blake2b(raw, digest_size=8).hexdigest()


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_all_64_bits_of_the_seed_count_and_neighbours_never_coincide(kind: str, packing: bool, tmp_path: Path) -> None:
    """Where the order of an epoch comes from seed + epoch, epoch 1 of seed 42 is epoch 0 of seed 43."""
    data = corpus(tmp_path, kind)
    seeds = [0, 1, 2, 2**32, 1 + 2**32, 1 + 2**40, 2**63, 2**64 - 1]
    assert len({tuple(batches(data, packing, data_seed=s).rows(1)) for s in seeds}) == len(seeds)
    n = batches(data, packing).epoch_windows
    orders = set()
    for seed, epoch in itertools.product(range(40, 44), range(6)):
        source = batches(data, packing, batch=n, accumulation=1, data_seed=seed)
        orders.add(tuple(source.rows(epoch + 1)))
    assert len(orders) == 24


@pytest.mark.parametrize("seed", [0, 42])
def test_the_global_generator_never_matters(seed: int, tmp_path: Path) -> None:
    data, got = corpus(tmp_path, "io"), []
    for _ in range(2):
        got.append([batches(data, False, data_seed=seed).batch(step).digest for step in range(1, 8)])
        np.random.seed(5)
        random.random()
    assert got[0] == got[1]


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_prefetch_changes_nothing(kind: str, packing: bool, depth: int, tmp_path: Path) -> None:
    data = corpus(tmp_path, kind)
    want = [batches(data, packing).batch(step).digest for step in range(1, 15)]
    with Prefetcher(batches(data, packing).batch, 1, 15, depth=depth) as ahead:
        assert [batch.digest for batch in ahead] == want


@pytest.mark.parametrize("packing", [False, True])
def test_many_threads_on_one_object_get_the_same(packing: bool, tmp_path: Path, monkeypatch: Any) -> None:
    from mlxdet.data import jsonl

    monkeypatch.setattr(jsonl, "IN_MEMORY", 100)  # read from the file
    monkeypatch.setattr(module, "PLANS", 1)
    data = corpus(tmp_path, "io")
    want = {step: batches(data, packing).batch(step) for step in range(1, 25)}
    shared, wrong = batches(data, packing), []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            step = rng.randrange(1, 25)
            if not same(shared.batch(step), want[step]):
                wrong.append(step)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Padding


def test_buckets() -> None:
    assert [bucket(n, 1024) for n in (1, 16, 17, 24, 25, 33, 49, 65, 97, 700)] == [
        16,
        16,
        24,
        24,
        32,
        48,
        64,
        96,
        128,
        768,
    ]
    assert [bucket(n, 40) for n in (30, 33, 40)] == [32, 40, 40]
    assert all(n <= bucket(n, 5000) < 1.5 * n for n in range(17, 5000))


def test_rows_of_like_length_meet_so_that_padding_is_small(tmp_path: Path, monkeypatch: Any) -> None:
    """And the control: without sorting, most of a batch is padding."""
    path = tmp_path / "rows.jsonl"
    rng = random.Random(3)
    rows = [{"input": "Q", "output": "x" * min(1000, int(2 ** rng.uniform(0, 10)))} for _ in range(800)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = KINDS["io"]([str(path)], template="plain", context=1024)

    def filled(pool: int) -> float:
        monkeypatch.setattr(module, "POOL", pool)
        source = RecordBatches(data, batch=8, accumulation=1, packing=False, data_seed=1, val_fraction=0, val_windows=1)
        made = [source.batch(step) for step in range(1, 101)]
        assert sorted(int(r) for b in made for r in b.rows) == list(range(800))
        return sum(int((b.spans[:, 2] - b.spans[:, 1]).sum()) for b in made) / sum(b.tokens.size for b in made)

    assert filled(64) > 0.75 > 0.5 > filled(1)


def test_groups_stay_in_step_across_epochs(tmp_path: Path) -> None:
    """37 rows in steps of 6: the epochs begin in the middle of a step, and yet steps hold rows of like length."""
    data = corpus(tmp_path, "io")
    source, spread = batches(data, False), []
    for step in range(1, 100):
        lengths = [int(b - a) for _, a, b in source.batch(step).spans.tolist()]
        spread.append(max(lengths) - min(lengths))
    shuffled = np.random.default_rng(0).permuted(np.tile(data.lengths, (300, 1)), axis=1)[:, :6]
    assert np.mean(spread) < 0.6 * np.mean(np.ptp(shuffled, axis=1))


def test_a_pairs_logprobs_are_those_of_hand_and_do_not_depend_on_its_mates(tmp_path: Path) -> None:
    """Fixed logits log(1..256 normalised) give token t the log-probability log((t + 1) / 32896), whatever precedes."""

    def logprobs(rows: list[dict[str, str]]) -> dict[int, tuple[float, float]]:
        path = tmp_path / f"{len(rows)}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        data = KINDS["preference"]([str(path)], template="plain", context=64)
        source = RecordBatches(
            data, batch=len(rows), accumulation=1, packing=False, data_seed=0, val_fraction=0, val_windows=1
        )
        batch = source.batch(1)
        token = np.log((batch.tokens[0, :, 1:] + 1) / 32896.0)
        sums = np.where(batch.scored[0], token, 0).sum(axis=-1)
        return {int(r): (sums[i], sums[len(rows) + i]) for i, r in enumerate(batch.rows)}

    pair = {"prompt": "Q", "chosen": "A", "rejected": "BC"}
    longer = {"prompt": "Q" * 20, "chosen": "x" * 30, "rejected": "y"}
    end = sum(np.log((ord(c) + 1) / 32896) for c in "</s>")
    want = (np.log(66 / 32896) + end, np.log(67 / 32896) + np.log(68 / 32896) + end)
    alone, beside = logprobs([pair])[0], logprobs([pair, longer])[0]
    assert alone == pytest.approx(want, rel=1e-12) and beside == pytest.approx(want, rel=1e-12)


# Packing


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_its_definition(seed: int) -> None:
    """The same windows as a search through all of them, one by one, and never more than 11/9 of the lower bound + 4."""
    rng = np.random.default_rng(seed)
    lengths, capacity = rng.integers(2, 42, 300), 41
    window = best_fit(lengths, capacity)
    used = np.bincount(window, weights=lengths)
    assert used.max() <= capacity and (np.unique(window) == np.arange(window.max() + 1)).all()
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
            rooms.append(min(fits) - length)
        else:
            rooms.append(capacity - length)
    assert Counter((capacity - used).astype(int).tolist()) == Counter(rooms)
    assert len(rooms) <= 11 / 9 * -(-lengths.sum() // capacity) + 4


def test_best_fit_by_hand() -> None:
    assert best_fit(np.array([3, 7, 5, 4, 6, 2]), 10).tolist() == [0, 0, 2, 1, 1, 2]
    assert best_fit(np.array([11, 11]), 11).tolist() == [0, 1]


def test_packing_fills_windows_and_mixes_rows_anew_each_epoch(tmp_path: Path) -> None:
    data = corpus(tmp_path, "io", 200)
    source = batches(data, True)
    share = data.lengths.sum() / (source.epoch_windows * (CONTEXT + 1))
    assert share > 0.9 > 0.6 > data.lengths.mean() / (CONTEXT + 1), "which is the share without packing"
    mates = []
    for epoch in range(3):
        made = batches(data, True, batch=source.epoch_windows, accumulation=1).batch(epoch + 1)
        assert len(made.rows) == 200
        lines = [made.rows[made.spans[:, 0] == line].tolist() for line in range(source.epoch_windows)]
        mates.append({frozenset(line) for line in lines if len(line) > 1})
    assert len(mates[0] & mates[1]) < 0.2 * len(mates[0]) and len(mates[1] & mates[2]) < 0.2 * len(mates[0])


def test_a_late_step_costs_what_an_early_one_costs(tmp_path: Path, monkeypatch: Any) -> None:
    data = corpus(tmp_path, "io")
    for packing in (False, True):
        source, made = batches(data, packing), []
        plan = source._make_plan
        monkeypatch.setattr(source, "_plan", lambda epoch: (made.append(epoch), plan(epoch))[1])  # noqa: B023
        source.batch(2**50)
        assert len(set(made)) <= 2


# Validation


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_validation_is_the_same_set_whatever_the_batch(kind: str, packing: bool, tmp_path: Path) -> None:
    data = corpus(tmp_path, kind, 60)
    source = batches(data, packing, val_fraction=0.5, val_windows=10)
    assert (source.train_rows, source.val_rows) == (30, 30)
    trained = {int(r) for step in range(1, 30) for r in source.rows(step)}
    assert trained == set(range(30))
    want = [data.sample(30 + 3 * i) for i in range(10)]  # 10 of 30, evenly spread
    for size in (1, 3, 10, 64):
        parts = source.validation(size)
        assert sum(len(tokens) for tokens, _ in parts) == 10 * data.sides
        assert len({tokens.shape[1] for tokens, _ in parts}) == 1, "one length, so one padding"
        at = 0
        for tokens, scored in parts:
            pairs = len(tokens) // data.sides
            assert pairs <= size and scored.shape == (len(tokens), tokens.shape[1] - 1)
            for side, i in itertools.product(range(data.sides), range(pairs)):
                part, line = want[at + i][side], side * pairs + i
                assert tokens[line, : len(part.ids)].tolist() == part.ids.tolist()
                assert np.flatnonzero(scored[line]).tolist() == (np.flatnonzero(part.scored) - 1).tolist()
            at += pairs
    assert batches(data, packing).validation(4) == []


def test_parts_without_a_row_are_refused(tmp_path: Path) -> None:
    data = corpus(tmp_path, "io", 5)
    with pytest.raises(
        UsageError, match=r"validation part has no row: --val-fraction 0.1 of 5 rows; .* turns validation off"
    ):
        batches(data, False, val_fraction=0.1)
    assert batches(data, False, val_fraction=0.2).val_rows == 1


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    data = corpus(tmp_path, "io", 5)
    for wrong, says in (
        ({"batch": 0}, "--batch"),
        ({"accumulation": 0}, "--accumulation"),
        ({"val_fraction": 1.0}, "--val-fraction"),
    ):
        with pytest.raises(UsageError, match=says):
            batches(data, False, **wrong)
    with pytest.raises(UsageError, match="--packing: preferences cannot be packed"):
        batches(corpus(tmp_path, "preference", 5), True)
    with pytest.raises(ValueError, match="from 1"):
        batches(data, False).batch(0)


@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_a_detour_reads_other_rows_drawn_by_its_own_key(kind: str, packing: bool, tmp_path: Path) -> None:
    from mlxdet.seeds import Splitmix64, stream

    data = corpus(tmp_path, kind)
    kw: Any = {"batch": 3, "accumulation": 2, "data_seed": 7, "val_fraction": 0.1, "val_windows": 10}
    batches = RecordBatches(data, packing=packing, **kw)
    for step, detour in ((1, 1), (5, 2)):
        want = list(map(int, Splitmix64(stream(7, "detour", step, detour)).integers(6, batches.train_rows)))
        got = batches.batch(step, detour)
        assert got.rows.tolist() == data.kept[want].tolist() == batches.rows(step, detour).tolist()
        assert got.digest != batches.batch(step).digest and got.tokens.shape[0] == 2
        assert len(got.spans) == 6 * data.sides
