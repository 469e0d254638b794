"""Spikes: a step whose loss or gradient norm stands far above the steps before it, judged as the steps come.

Over the last `window` records each series has a level (its median) and a robust deviation (1.4826 times the median
absolute deviation, which on normal noise is the standard deviation). With factor F, a step is a spike if

    its loss stands F deviations above, or its gradient norm does, or both stand F / 2, or one of them is not finite.

Loss is taken as it is. The gradient norm is taken in logarithms, and its deviation is at least three quarters of the
distance from its median to its 95th percentile: norms have a heavy upper tail, and in ordinary runs single steps reach
7 to 23 plain deviations while nothing happens to the loss (`docs/spikes.md` has the measurements).

Every finite value enters the window, spikes too. A median bears that: a short spike moves it by a few ranks, so it
does not hide the next one, and a change of level that stays becomes the new level before half a window has passed. It
also makes a judgement a pure function of the last window + QUIET records, so a resume needs the log and nothing else.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW, FACTOR = 100, 6.0  # measured: docs/spikes.md
MINIMUM = 20  # finite values a level needs
QUIET = 10  # records without a spike that end one

# A deviation is at least this much: a series that stands still has none, and its rounding errors are no spikes.
LOSS_FLOOR, LOG_NORM_FLOOR = 1e-3, 1e-2  # relative to the median: 0.1 % of a loss, 1 % of a norm
TINY = 1e-6  # of a loss, where the median is 0


@dataclass(frozen=True)
class Level:
    """Median and robust deviation of a window; of a gradient norm both are of its natural logarithm."""

    median: float
    deviation: float

    def at(self, deviations: float) -> float:
        """Return the value that stands `deviations` above the median."""
        return self.median + deviations * self.deviation

    def deviations(self, value: float) -> float:
        """Return how many deviations `value` stands above the median."""
        return (value - self.median) / self.deviation


@dataclass(frozen=True)
class Limits:
    """What the next step is judged by, known before it runs. A level is None while there is too little history."""

    loss: Level | None
    log_norm: Level | None
    factor: float

    def thresholds(self) -> tuple[float, float, float, float]:
        """Return the least loss and gradient norm that is a spike alone, then the least of each that is one together.

        Infinite where there is no level. These numbers decide, so a comparison made elsewhere agrees with `judge`.
        """
        both = self.factor / 2
        loss, joint_loss = (self.loss.at(f) if self.loss else math.inf for f in (self.factor, both))
        norm, joint_norm = (_exp(self.log_norm.at(f)) if self.log_norm else math.inf for f in (self.factor, both))
        return loss, norm, joint_loss, joint_norm

    def judge(self, loss: float, grad_norm: float | None) -> str | None:
        """Return why a step is a spike ("not finite", "loss", "gradient norm", "both"), None if it is not."""
        norm = -math.inf if grad_norm is None else grad_norm
        if not math.isfinite(loss) or not (grad_norm is None or math.isfinite(grad_norm)):
            return "not finite"
        alone_loss, alone_norm, joint_loss, joint_norm = self.thresholds()
        if loss >= alone_loss:
            return "loss"
        if norm >= alone_norm:
            return "gradient norm"
        return "both" if loss >= joint_loss and norm >= joint_norm else None


@dataclass(frozen=True)
class Spike:
    """A step that is a spike. `onset`: none of the QUIET records before it was one, so it begins here.

    The medians, and how many robust deviations the step stands above them, are None where there was too little history,
    no gradient norm, or nothing finite to measure.
    """

    step: int
    reason: str
    onset: bool
    loss: float
    grad_norm: float | None
    loss_median: float | None
    loss_deviations: float | None
    norm_median: float | None
    norm_deviations: float | None

    def text(self) -> str:
        """Return in a few words how far the step stands out."""
        parts = [f"{what} {deviations:.1f} deviations above {median:.4g}"
                 for what, median, deviations in (("loss", self.loss_median, self.loss_deviations),
                                                  ("gradient norm", self.norm_median, self.norm_deviations))
                 if median is not None and deviations is not None]  # fmt: skip
        return ", ".join(parts) or self.reason


class _Window:
    """The last `size` values of a series, None where one is missing, and those that are there in order of size."""

    def __init__(self, size: int):
        self.size, self.values, self.ordered = size, deque[float | None](), list[float]()

    def add(self, value: float | None) -> None:
        self.values.append(value)
        if value is not None:
            insort(self.ordered, value)
        oldest = self.values.popleft() if len(self.values) > self.size else None
        if oldest is not None:
            del self.ordered[bisect_left(self.ordered, oldest)]


class Detector:
    """Judges the records of a run one by one. Its whole state is the last window + QUIET records it has seen."""

    def __init__(self, window: int = WINDOW, factor: float = FACTOR):
        """`window`: records looked back on, at least MINIMUM. `factor`: robust deviations that make a spike."""
        self.window, self.factor = window, factor
        self._losses, self._log_norms = _Window(window), _Window(window)
        self._quiet = QUIET
        self._limits: Limits | None = None  # made once for a step, however often it is asked for

    @staticmethod
    def after(records: Iterable[Mapping[str, Any]], window: int = WINDOW, factor: float = FACTOR) -> "Detector":
        """Return the detector of a run whose log holds `records`: equal to one that saw them all as they came."""
        detector = Detector(window, factor)
        for r in deque(records, maxlen=window + QUIET):
            detector.see(r["step"], r["loss"], r.get("grad_norm"))
        return detector

    def limits(self) -> Limits:
        """Return what the next record is judged by."""
        if self._limits is None:
            losses, log_norms = self._losses.ordered, self._log_norms.ordered
            self._limits = Limits(
                _loss_level(losses) if len(losses) >= MINIMUM else None,
                _norm_level(log_norms) if len(log_norms) >= MINIMUM else None,
                self.factor,
            )
        return self._limits

    def see(self, step: int, loss: float, grad_norm: float | None = None) -> Spike | None:
        """Take the next record; return the spike it is, or None."""
        limits, self._limits = self.limits(), None
        reason = limits.judge(loss, grad_norm)
        finite = loss if math.isfinite(loss) else None
        log_norm = None if grad_norm is None or not math.isfinite(grad_norm) else _log(grad_norm)
        self._losses.add(finite)
        self._log_norms.add(log_norm)
        if reason is None:
            self._quiet += 1
            return None
        onset, self._quiet = self._quiet >= QUIET, 0
        level, log_level = limits.loss, limits.log_norm
        return Spike(
            step, reason, onset, loss, grad_norm,
            level.median if level else None,
            level.deviations(finite) if level and finite is not None else None,
            _exp(log_level.median) if log_level else None,
            log_level.deviations(log_norm) if log_level and log_norm is not None else None,
        )  # fmt: skip


def _loss_level(ordered: list[float]) -> Level:
    median, deviation = _robust(ordered)
    return Level(median, max(deviation, LOSS_FLOOR * abs(median), TINY))


def _norm_level(ordered: list[float]) -> Level:
    median, deviation = _robust(ordered)
    tail = ordered[len(ordered) * 95 // 100] - median
    return Level(median, max(deviation, 0.75 * tail, LOG_NORM_FLOOR))


def _robust(ordered: list[float]) -> tuple[float, float]:
    """Return the median and 1.4826 times the median absolute deviation."""
    median = _median(ordered)
    return median, 1.4826 * _median(sorted([abs(v - median) for v in ordered]))


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-38))  # a gradient of exactly 0 has a logarithm too


def _exp(log_norm: float) -> float:
    return math.exp(min(log_norm, 700.0))  # beyond any float32; exp(710) would raise
