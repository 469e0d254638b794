"""Batches of rows: batch(step) is a pure function of corpus, settings, seed and step, as for text.

Row order: sample number g of a run is number g % N of epoch g // N, so each epoch takes every row exactly once, the
last batch of an epoch runs into the next, and nothing has to be saved or fast-forwarded to resume. An epoch has a plan,
made when it is first asked for from (seed, epoch) alone, and remembered.

* Padded: an epoch is a permutation of the rows. A step is padded at its end to the next of a few lengths (`bucket`), so
  that few shapes are compiled; to save padding, the rows of POOL steps at a time are gathered by bucket (in a bucket
  they stay as they were shuffled), cut into steps, and the steps of the epoch shuffled.
* Packed: rows share windows of context + 1 tokens, side by side, never cut. Which lengths share a window is worked out
  once for the multiset of lengths (best fit, longest first), so the number of windows is the same in every epoch; each
  epoch deals the rows anew to the places of their length, and takes the windows in an order of its own. `segments` and
  `positions` keep the rows of a window apart, and a row's first token is never scored.

Reference for block-wise attention over packed rows: Krell et al., arXiv:2107.02027.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mlxdet.data.cache import width
from mlxdet.data.order import permuted, windows
from mlxdet.data.records import RecordCorpus
from mlxdet.data.templates import Tokens
from mlxdet.errors import UsageError
from mlxdet.seeds import stream

POOL = 64  # steps whose rows are gathered by bucket together
PLANS = 4  # epochs remembered
SMALLEST = 16  # bucket


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The data of one step. inputs = tokens[..., :-1], targets = tokens[..., 1:], length L of both.

    Lines: `batch` per micro-batch, for preferences twice as many, the chosen answers first, then the rejected ones in
    the same order. `scored` belongs to the targets.
    """

    step: int  # from 1: the step this batch trains
    tokens: np.ndarray  # int32 (accumulation, lines, L + 1); padding is 0
    scored: np.ndarray  # bool (accumulation, lines, L): which targets count
    positions: np.ndarray | None  # packed: int32 (accumulation, lines, L), of each input, from 0 in every row
    segments: np.ndarray | None  # packed: int32 (accumulation, lines, L), of each input; padding is one more segment
    rows: np.ndarray  # int64 (n,): rows of the corpus, for `where`, in the order of the lines
    spans: np.ndarray  # int64 (n * sides, 3): line of tokens.reshape(-1, L + 1), first token, token after the last
    digest: str  # 16 hex: BLAKE2b-8 of rows, spans, tokens (little-endian, as narrow as the vocabulary allows), scored
    reference: np.ndarray | None = None  # dpo: float32 (accumulation, lines), added by training/reference.py


class Lines(NamedTuple):
    """The arrays of a batch before they are cut into micro-batches: (lines, L + 1), (lines, L), ..., as RecordBatch."""

    tokens: np.ndarray
    scored: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    spans: np.ndarray


class _Plan(NamedTuple):
    """One epoch: windows[starts[w] : starts[w + 1]] are the samples of window w (of one sample each if padded)."""

    starts: np.ndarray
    samples: np.ndarray


class RecordBatches:
    """Training batches and fixed validation batches over the rows of a corpus.

    The last `val_fraction` of the rows is the validation part (0: none). Raises UsageError if a part has no row.
    """

    def __init__(
        self,
        corpus: RecordCorpus,
        *,
        batch: int,
        accumulation: int,
        packing: bool,
        data_seed: int,
        val_fraction: float,
        val_windows: int,
    ):
        if min(batch, accumulation) < 1:
            raise UsageError("--batch and --accumulation must be at least 1")
        if not 0 <= val_fraction < 1:
            raise UsageError(f"--val-fraction: {val_fraction} is out of range; give a number from 0 to below 1")
        if packing and corpus.sides > 1:
            raise UsageError("--packing: preferences cannot be packed, as the two answers of a pair stand side by side")
        self.corpus, self.context, self.packing, self.data_seed = corpus, corpus.context, packing, data_seed
        self.batch_size, self.accumulation, self._val_windows = batch, accumulation, val_windows
        self.val_rows = int(len(corpus) * val_fraction)
        self.train_rows = len(corpus) - self.val_rows
        if val_fraction and not self.val_rows:
            raise UsageError(
                f"the validation part has no row: --val-fraction {val_fraction} of {len(corpus)} rows; give more rows, "
                f"a larger share, or 0, which turns validation off"
            )
        if not self.train_rows:
            raise UsageError(f"--val-fraction: {val_fraction} of {len(corpus)} rows leaves none for training")
        lengths = self._lengths = corpus.lengths[: self.train_rows]
        if packing:
            window = best_fit(lengths, self.context + 1)
            self._by_length = np.argsort(-lengths, kind="stable")
            self._place = np.argsort(window[self._by_length], kind="stable")  # the places, window by window
            self._starts = np.cumsum([0, *np.bincount(window)])
        else:
            some, which = np.unique(lengths, return_inverse=True)
            self._buckets = np.array([bucket(length - 1, self.context) for length in some.tolist()])[which]
        self.epoch_windows = len(self._starts) - 1 if packing else self.train_rows
        self._plan = lru_cache(maxsize=PLANS)(self._make_plan)

    def _key(self, name: str, epoch: int) -> int:
        return stream(self.data_seed, name, epoch)

    def _make_plan(self, epoch: int) -> _Plan:
        n = self.train_rows
        order = permuted(np.arange(n), n, self._key("rows", epoch))
        if self.packing:
            # `order` sorted by length, ties as they come: a new row for each place of that length.
            dealt = order[np.argsort(-self._lengths[order], kind="stable")][self._place]
            turn = permuted(np.arange(self.epoch_windows), self.epoch_windows, self._key("row windows", epoch))
            sizes = np.diff(self._starts)[turn]
            starts = np.cumsum([0, *sizes])
            return _Plan(starts, dealt[np.repeat(self._starts[:-1][turn] - starts[:-1], sizes) + np.arange(n)])
        return _Plan(np.arange(n + 1), self._grouped(order, epoch))

    def _grouped(self, order: np.ndarray, epoch: int) -> np.ndarray:
        """Return `order` with rows of one bucket in the same step. The steps of a run go on across epochs."""
        size = self.batch_size * self.accumulation
        head = min(-epoch * len(order) % size, len(order))  # these finish the last step of the epoch before
        body = order[head:]
        pool = np.arange(len(body)) // (POOL * size)
        body = body[np.lexsort((self._buckets[body], pool))]
        steps = len(body) // size
        if steps:
            whole = body[: steps * size].reshape(steps, size)
            whole = whole[permuted(np.arange(steps), steps, self._key("row groups", epoch))]
            body = np.concatenate([whole.ravel(), body[steps * size :]])
        return np.concatenate([order[:head], body])

    def samples(self, step: int, detour: int = 0) -> list[list[int]]:
        """Return the samples in each window of `step` (from 1): lists of one where rows are padded.

        A detour (from 1; training/detours.py) reads other rows: random ones, each in a window of its own.
        """
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        n, size = self.epoch_windows, self.batch_size * self.accumulation
        if detour:
            key = stream(self.data_seed, "detour", step, detour)
            return [[i] for i in windows(np.array([key], np.uint64), size, self.train_rows)[0].tolist()]
        found = []
        for g in range((step - 1) * size, step * size):
            epoch, index = divmod(g, n)
            plan = self._plan(epoch)
            found.append(plan.samples[plan.starts[index] : plan.starts[index + 1]].tolist())
        return found

    def rows(self, step: int, detour: int = 0) -> np.ndarray:
        """Return the rows of the corpus that `step` reads, int64 (n,), as in its batch, without reading them."""
        return self.corpus.kept[[i for window in self.samples(step, detour) for i in window]]

    def batch(self, step: int, detour: int = 0) -> RecordBatch:
        """Return the batch that trains `step` (from 1). Thread-safe, and the same whatever was asked before."""
        samples = self.samples(step, detour)
        lines = self._lines(samples, self.batch_size, self.context if self.packing else 0)
        rows = self.corpus.kept[[i for window in samples for i in window]]
        digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=8)
        digest.update(lines.spans.astype("<i8").tobytes())
        digest.update(lines.tokens.astype(width(self.corpus.vocab_size)).tobytes() + lines.scored.tobytes())
        tokens, scored, positions, segments = (
            part.reshape(self.accumulation, -1, part.shape[-1]) for part in lines[:4]
        )
        return RecordBatch(
            step,
            tokens,
            scored,
            positions if self.packing else None,
            segments if self.packing else None,
            rows,
            lines.spans,
            digest.hexdigest(),
        )

    def validation(self, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the validation rows as (tokens, scored), at most `batch` rows (pairs) each: the same whatever `batch`.

        int32 (lines, L + 1) and bool (lines, L), one row a line, all padded to one length; for preferences the chosen
        answers of a part come first, then the rejected ones. Consecutive rows, or evenly spread ones where there are
        more than `val_windows`. Empty if there is no part.
        """
        count = min(self.val_rows, self._val_windows)
        chosen = self.train_rows + np.arange(count, dtype=np.int64) * self.val_rows // max(1, count)
        longest = bucket(int(self.corpus.lengths[chosen].max(initial=2)) - 1, self.context)
        parts = [chosen[i : i + batch].tolist() for i in range(0, count, batch)]
        return [self._lines([[i] for i in part], len(part), longest)[:2] for part in parts]

    def _lines(self, windows: Sequence[Sequence[int]], group: int, length: int) -> Lines:
        """Return the windows as lines of `length` inputs (0: the bucket of the longest row), `group` windows together.

        For preferences a group is followed by its rejected answers.
        """
        sides = self.corpus.sides
        samples = [[self.corpus.sample(i) for i in window] for window in windows]
        longest = max(sum(len(sample[side].ids) for sample in window) for window in samples for side in range(sides))
        lines = [
            [sample[side] for sample in window]
            for start in range(0, len(samples), group)
            for side in range(sides)
            for window in samples[start : start + group]
        ]
        return lay_out(lines, length or bucket(longest - 1, self.context))


class Piece(NamedTuple):
    """A row where it stands in a batch: tokens start to stop - 1 of a line of tokens.reshape(-1, L + 1)."""

    row: int  # of the corpus
    side: str  # of a pair: "chosen" or "rejected"
    line: int
    start: int
    stop: int


def pieces(batch: RecordBatch) -> list[Piece]:
    """Return the rows of a batch in the order of its lines."""
    lines = batch.tokens.shape[1]
    if len(batch.spans) == len(batch.rows):
        return [Piece(int(row), "", *span) for row, span in zip(batch.rows, batch.spans.tolist(), strict=True)]
    pairs, found = lines // 2, []
    for line, start, stop in batch.spans.tolist():
        group, within = divmod(line, lines)
        side = "rejected" if within >= pairs else "chosen"
        found.append(Piece(int(batch.rows[group * pairs + within % pairs]), side, line, start, stop))
    return found


def lay_out(lines: Sequence[Sequence[Tokens]], length: int) -> Lines:
    """Return token sequences side by side in lines of `length` inputs. Raises ValueError if a line is too long."""
    shape = (len(lines), length)
    tokens, scored = np.zeros((len(lines), length + 1), np.int32), np.zeros(shape, bool)
    positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    spans = []
    for i, line in enumerate(lines):
        start = 0
        for segment, part in enumerate([*line, None]):
            stop = start + len(part.ids) if part else length + 1
            if stop > length + 1:
                raise ValueError(f"line {i} has {stop} tokens, more than {length + 1}")
            inputs = slice(start, min(stop, length))
            positions[i, inputs] = np.arange(inputs.stop - start)  # none for padding that begins at the last target
            segments[i, inputs] = segment
            if part:
                tokens[i, start:stop] = part.ids
                scored[i, start : stop - 1] = part.scored[1:]  # the first token has nothing before it
                spans.append((i, start, stop))
            start = stop
    return Lines(tokens, scored, positions, segments, np.array(spans, np.int64).reshape(-1, 3))


def bucket(inputs: int, most: int) -> int:
    """Return the length that `inputs` are padded to: 16, 24, 32, 48, 64, 96, ..., at most `most`."""
    size = SMALLEST
    while size < inputs:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the window of each row, int64 (n,): longest row first, each into the fullest window it fits in.

    `lengths`: int (n,), each from 1 to `capacity`. Among equal windows the one opened or used last; equal lengths in
    their order. Best-fit decreasing (Johnson, 1974) opens at most 11/9 as many windows as are needed, plus 4.
    """
    room: list[list[int]] = [[] for _ in range(capacity + 1)]  # windows by what they still hold
    some = 0  # bit r: room[r] is not empty
    window = np.zeros(len(lengths), np.int64)
    count = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        fits = some >> length
        if fits:
            size = length + (fits & -fits).bit_length() - 1
            found = room[size].pop()
            if not room[size]:
                some ^= 1 << size
        else:
            size, found, count = capacity, count, count + 1
        window[row] = found
        left = size - length
        room[left].append(found)
        some |= 1 << left
    return window
