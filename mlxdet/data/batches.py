"""Batches of token windows: batch(step) is a pure function of corpus, settings, seed and step, and Prefetcher makes
them early.

Nothing has to be saved or fast-forwarded to resume: step 1,000,000 costs what step 1 costs. `rows` are computed for a
block of steps at a time, because a numpy call costs more than the numbers it makes; the last block is remembered,
which changes no value.

Order "windows": windows of context + 1 tokens at random starts, with replacement; every start is possible. Order
"epochs": the text is cut into consecutive windows that overlap by the one token that is last target and next input;
each epoch takes them all once, in a permutation of its own, and shifts the cuts by an offset drawn for the epoch, so
that no token at the end is left out.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from mlxdet.data.order import permuted, windows
from mlxdet.data.text import Corpus
from mlxdet.errors import UsageError
from mlxdet.seeds import stream

BLOCK = 2048  # rows computed at a time, about


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one step. inputs = tokens[..., :-1], targets = tokens[..., 1:]."""

    step: int  # from 1: the step this batch trains
    tokens: np.ndarray  # int32 (accumulation, batch, context + 1)
    rows: np.ndarray  # int64 (accumulation * batch,): index of the first token of each window
    digest: (
        str  # 16 hex: BLAKE2b-8 of rows and tokens, little-endian, tokens as wide as in the corpus (1, 2 or 4 bytes)
    )


class TextBatches:
    """Training batches and fixed validation windows over a corpus.

    The last `val_fraction` of the tokens is the validation part (0: none); no window crosses into it. Raises
    UsageError if a part is shorter than a window.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        batch: int,
        accumulation: int,
        order: str,
        data_seed: int,
        val_fraction: float,
        val_windows: int,
    ):
        if order not in ("windows", "epochs"):
            raise UsageError(f"--order: {order!r} is not an order; choose windows or epochs")
        if min(context, batch, accumulation) < 1:
            raise UsageError("--context, --batch and --accumulation must be at least 1")
        if not 0 <= val_fraction < 1:
            raise UsageError(f"--val-fraction: {val_fraction} is out of range; give a number from 0 to below 1")
        self.corpus, self.context, self.order, self.data_seed = corpus, context, order, data_seed
        self.shape = (accumulation, batch, context + 1)
        self.val_tokens = int(len(corpus) * val_fraction)
        self.train_tokens = len(corpus) - self.val_tokens
        self._check_length(val_fraction)
        self.positions = self.train_tokens - context  # possible window starts
        self.epoch_windows = (self.train_tokens - 1) // context  # windows of an epoch
        self._slack = (self.train_tokens - 1) % context
        self._val_windows = val_windows
        self._windows = np.lib.stride_tricks.sliding_window_view(corpus.tokens, context + 1)
        self._little = corpus.tokens.dtype.newbyteorder("<")
        self._rows = accumulation * batch
        self._steps = max(1, BLOCK // self._rows)
        self._last: tuple[int, np.ndarray] = (-1, np.zeros((0, 0), np.int64))

    def _check_length(self, val_fraction: float) -> None:
        need, total = self.context + 1, len(self.corpus)
        if total < need:
            raise UsageError(
                f"the text is too short: a context of {self.context} needs at least {need} tokens, it has {total}; "
                f"give more text or a smaller --context"
            )
        for part, size in (("training", self.train_tokens), ("validation", self.val_tokens)):
            if size < need and (part == "training" or val_fraction > 0):
                raise UsageError(
                    f"the {part} part of the text is too short: a context of {self.context} needs at least {need} "
                    f"tokens, it has {size} of {total}; change --val-fraction {val_fraction} (0 turns validation off), "
                    f"give more text or a smaller --context"
                )

    def rows(self, step: int, detour: int = 0) -> np.ndarray:
        """Return the first token index of each window of `step` (from 1), int64 (accumulation * batch,), read-only.

        A detour (from 1; training/detours.py) reads other rows: random windows, in either order.
        """
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        if detour:
            key = stream(self.data_seed, "detour", step, detour)
            return windows(np.array([key], np.uint64), self._rows, self.positions)[0]
        number, within = divmod(step - 1, self._steps)
        last, block = self._last  # one read: another thread may replace the pair at any time
        if last != number:
            first = number * self._steps + 1
            block = self._random(first) if self.order == "windows" else self._epochs(first)
            block.flags.writeable = False
            self._last = (number, block)
        return block[within]

    def _random(self, first: int) -> np.ndarray:
        keys = [stream(self.data_seed, "train", step) for step in range(first, first + self._steps)]
        return windows(np.array(keys, np.uint64), self._rows, self.positions)

    def _epochs(self, first: int) -> np.ndarray:
        n, size = self.epoch_windows, self._steps * self._rows
        start = (first - 1) * self._rows
        lowest, highest = start // n, (start + size - 1) // n
        epochs = range(lowest, highest + 1)
        index = np.arange(size) + start % n
        which, index = index // n, index % n
        keys = np.array([stream(self.data_seed, "epoch", epoch) for epoch in epochs], np.uint64)
        shifts = np.array([stream(self.data_seed, "offset", epoch) for epoch in epochs], np.uint64)
        offset = windows(shifts, 1, self._slack + 1)[:, 0]
        place = permuted(index, n, keys[which])
        return (place * self.context + offset[which]).reshape(self._steps, self._rows)

    def batch(self, step: int, detour: int = 0) -> Batch:
        """Return the batch that trains `step` (from 1). Thread-safe, and the same whatever was asked before."""
        rows = self.rows(step, detour)
        tokens = self._windows[rows]
        digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=8)
        digest.update(tokens.astype(self._little, copy=False))
        return Batch(step, tokens.astype(np.int32).reshape(self.shape), rows, digest.hexdigest())

    def validation(self, batch: int) -> list[np.ndarray]:
        """Return the validation windows, int32 (at most `batch`, context + 1) each: the same whatever the batch.

        They are consecutive, or evenly spread where the part holds more than `val_windows`. Empty if there is no part.
        """
        available = max(0, self.val_tokens - 1) // self.context
        count = min(available, self._val_windows)
        chosen = np.arange(count, dtype=np.int64) * available // max(1, count)
        rows = self.train_tokens + chosen * self.context
        return [self._windows[rows[i : i + batch]].astype(np.int32) for i in range(0, count, batch)]


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Makes produce(start), ..., produce(stop - 1) ahead of time in threads and delivers them in that order.

    depth 0: no thread, each is made when asked for. depth n: at most n wait or are being made. Use it as
    `with Prefetcher(batches.batch, 1, 11, depth=2) as ahead: for batch in ahead: ...`. An exception in `produce` is
    raised where its result would have come, after all results before it. Threads finish in any order; since
    produce(step) depends on the step alone, that changes nothing but the time.
    """

    def __init__(self, produce: Callable[[int], T], start: int, stop: int, depth: int, workers: int = 4):
        self._produce, self._next, self._stop, self._depth = produce, start, stop, depth
        self._taken = start  # the next step for a worker
        self._ready: dict[int, tuple[T | None, BaseException | None]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._workers = min(depth, workers)

    def __enter__(self) -> "Prefetcher[T]":
        for i in range(self._workers if self._next < self._stop else 0):
            thread = threading.Thread(target=self._work, name=f"mlxdet-prefetch-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed or self._next >= self._stop:
            raise StopIteration
        if not self._depth:
            value = self._produce(self._next)
            self._next += 1
            return value
        if not self._threads:
            raise RuntimeError("enter the Prefetcher first: `with Prefetcher(...) as ahead:`")
        with self._changed:
            while self._next not in self._ready:
                self._changed.wait()
            result, error = self._ready.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        if error is not None:
            self.close()
            raise error
        return result  # type: ignore[return-value]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._next + self._depth <= self._taken < self._stop:
                    self._changed.wait()
                if self._closed or self._taken >= self._stop:
                    return
                step = self._taken
                self._taken += 1
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (self._produce(step), None)
            except BaseException as error:
                outcome = (None, error)
            with self._changed:
                self._ready[step] = outcome
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads and drop what they made. Waits 5 s for each at most: a stuck one is left as a daemon."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
