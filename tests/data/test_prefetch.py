"""Prefetch is a matter of speed: same items, same order, same exceptions at every depth, and nothing left behind."""

import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from mlxdet.data import Prefetcher, TextBatches
from mlxdet.data.text import Corpus

DEPTHS = (0, 1, 4)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left


def slow_square(step: int) -> int:
    time.sleep(random.random() * 0.004)
    return step * step


@pytest.mark.parametrize("depth", [*DEPTHS, 64])
@pytest.mark.parametrize(("start", "stop"), [(1, 60), (17, 60), (5, 6), (5, 5), (9, 3)])
def test_delivers_in_order_whatever_the_timing(depth: int, start: int, stop: int) -> None:
    with Prefetcher(slow_square, start, stop, depth) as ahead:
        assert list(ahead) == [step * step for step in range(start, stop)]
        assert list(ahead) == []


@pytest.mark.parametrize("order", ["windows", "epochs"])
def test_batches_are_those_of_the_step(corpus: Corpus, order: str) -> None:
    def make() -> TextBatches:
        return TextBatches(
            corpus, context=8, batch=3, accumulation=1, order=order, data_seed=1, val_fraction=0.1, val_windows=2
        )

    plain = make()
    want = [plain.batch(step).digest for step in range(1, 40)]
    for depth in DEPTHS:
        source = make()

        def produce(step: int, source: TextBatches = source) -> str:
            time.sleep(random.random() * 0.003)
            return source.batch(step).digest

        with Prefetcher(produce, 1, 40, depth) as ahead:
            assert list(ahead) == want
        with Prefetcher(produce, 21, 40, depth) as ahead:
            assert list(ahead) == want[20:]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_exception_comes_at_its_step(depth: int) -> None:
    def produce(step: int) -> int:
        if step >= 5:
            raise ZeroDivisionError(f"step {step}")
        return slow_square(step)

    got = []
    with Prefetcher(produce, 1, 20, depth) as ahead, pytest.raises(ZeroDivisionError, match="step 5"):
        for value in ahead:
            got.append(value)
    assert got == [1, 4, 9, 16]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("how", [KeyboardInterrupt, ValueError, None])
def test_leaving_early_ends_the_threads(depth: int, how: type[BaseException] | None) -> None:
    started = time.monotonic()
    ahead = Prefetcher(slow_square, 1, 10**9, depth)
    try:
        with ahead:
            for value in ahead:
                if value == 49:
                    if how is None:
                        break
                    raise how
    except (KeyboardInterrupt, ValueError) as error:
        assert type(error) is how
    ahead.close()
    assert time.monotonic() - started < 5


def test_runs_ahead_by_depth_and_no_more() -> None:
    made: list[int] = []
    with Prefetcher(lambda step: made.append(step) or step, 1, 100, 3) as ahead:
        for taken in range(5):
            deadline = time.monotonic() + 5
            while len(made) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            assert sorted(made) == list(range(1, taken + 4))
            next(ahead)


def test_without_threads_nothing_is_made_before_it_is_asked_for() -> None:
    made: list[int] = []
    ahead = Prefetcher(lambda step: made.append(step), 1, 100, 0)
    assert made == []
    next(ahead)
    assert made == [1]


def test_must_be_entered() -> None:
    with pytest.raises(RuntimeError, match="enter"):
        next(Prefetcher(slow_square, 1, 3, 2))


def test_an_interrupt_ends_the_wait_for_a_slow_batch() -> None:
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Prefetcher(lambda step: time.sleep(0.6), 1, 9, 2) as ahead:
        timer.start()
        next(ahead)
    assert time.monotonic() - started < 5
    timer.join()


def test_a_stuck_worker_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    release, real = threading.Event(), threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: real(self, min(timeout or 60, 0.05)))
    with Prefetcher(lambda step: release.wait(30), 1, 9, 2):
        pass
    release.set()
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name.startswith("mlxdet-prefetch"):
            thread.join(5)
