"""How the distance of two runs of one command goes with the step: at the rounding floor, or growing, and how fast.

A difference that training amplifies grows exponentially until the runs have nothing in common (relFro near 1), so what
is fitted is log10 of the distance against the step: a line, after a level stretch (the floor) and before another (the
plateau) where there are such.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FLOOR = 1e-6  # relFro up to which a distance is a few last bits of float32 (epsilon 1.2e-7)
BREAK = 1.0  # decades by which a distance must fall for what came before to break the trend
LEVEL = 0.5  # decades within which rungs are level
STRAIGHT = 7.0  # how many times as far as it is off a line must rise
NOISE = 0.05  # decades: residuals below it do not count when fits are compared


@dataclass(frozen=True)
class Growth:
    """What `fit_growth` found. `kind` is one of

    * "identical": every distance is zero
    * "floor": the distances do not grow and stay at rounding (FLOOR)
    * "level": they do not grow, above that
    * "growth": exponential from step `start` to `end`; `doubling` steps make the distance twice as large, and the fit
      is off by the factor `residual` (root mean square). `plateau` is the distance that it levels off at, if it does
    * "irregular": the distances change at no steady rate, or there are too few to tell

    `anomalies` are the steps that break the trend: the distance there is tenfold off what came before or after, and
    went back. They stay out of the fit, as do distances of zero, which have no logarithm.
    """

    kind: str
    doubling: float | None = None
    residual: float | None = None
    start: int | None = None
    end: int | None = None
    plateau: float | None = None
    anomalies: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"anomalies": list(self.anomalies)}

    def __str__(self) -> str:
        if self.kind == "identical":
            return "bit-identical at every rung"
        steps = ", ".join(map(str, self.anomalies))
        odd = f"; breaking the trend: step{'s' if len(self.anomalies) > 1 else ''} {steps}" if steps else ""
        if self.kind == "floor":
            return f"does not grow: at the rounding floor{odd}"
        if self.kind == "level":
            return f"does not grow, but stays above the rounding floor{odd}"
        if self.kind == "growth":
            after = f", then levels off at {self.plateau:.2g}" if self.plateau is not None else ""
            return (
                f"grows from step {self.start} to {self.end}: doubles every {self.doubling:.3g} steps "
                f"(residual factor {self.residual:.2f}){after}{odd}"
            )
        return f"changes at no steady rate, or too few rungs to tell{odd}"


def fit_growth(steps: Sequence[int], distances: Sequence[float]) -> Growth:
    """Return how `distances` (relFro, each >= 0 and finite) at rising `steps` grow."""
    if not any(distances):
        return Growth("identical")
    x = np.array([s for s, d in zip(steps, distances, strict=True) if d > 0], float)
    y = np.log10([d for d in distances if d > 0])
    kept = _unbroken(y)
    anomalies = tuple(int(s) for i, s in enumerate(x) if i not in kept)
    x, y = x[kept], y[kept]
    fits = [fit for i in range(len(x) - 2) for j in range(i + 2, len(x)) if (fit := _fit(x, y, i, j)) is not None]
    if fits:
        _, slope, rms, i, j = min(fits)
        plateau = float(10 ** y[j + 1 :].mean()) if j + 1 < len(x) else None
        doubling = math.log10(2.0) / slope
        return Growth("growth", doubling, float(10**rms), int(x[i]), int(x[j]), plateau, anomalies)
    if y.max() <= math.log10(FLOOR):
        return Growth("floor", anomalies=anomalies)
    level = len(y) > 2 and y.max() - y.min() <= BREAK
    return Growth("level" if level else "irregular", anomalies=anomalies)


def _unbroken(y: np.ndarray) -> list[int]:
    """Return the indices of the longest subsequence of `y` that never falls by more than BREAK below its highest.

    Runs that have parted do not come together again, so what must be left out for this to hold is out of the ordinary:
    a rung above the later ones, or below those around it. Where two choices leave out equally many, the one that keeps
    the later rungs wins.
    """
    best: dict[tuple[int, float], list[int]] = {}  # (last index, highest value) -> indices
    for i, value in enumerate(y):
        longer = {(i, float(value)): [i]}
        for (_, high), chosen in best.items():
            if value >= high - BREAK:
                key = (i, max(high, float(value)))
                if len(chosen) + 1 > len(longer.get(key, [])):
                    longer[key] = [*chosen, i]
        best.update(longer)
    return max(best.values(), key=lambda chosen: (len(chosen), chosen))


def _fit(x: np.ndarray, y: np.ndarray, i: int, j: int) -> tuple[float, float, float, int, int] | None:
    """Fit level, line, level with the line from rung i to j. Return (score, slope, rms of the line, i, j).

    None if that is no growth: the line must rise STRAIGHT times as far as it is off, and twofold if it is all there is,
    tenfold beside level stretches; those must be level. The score is the Bayesian information criterion, which
    weighs residuals against the number of free parameters; lower is better.
    """
    before, line, after = y[:i], y[i : j + 1], y[j + 1 :]
    slope, start = np.polyfit(x[i : j + 1], line, 1)
    off = line - (start + slope * x[i : j + 1])
    rms, rise = float(np.sqrt(np.mean(off**2))), slope * (x[j] - x[i])
    least = BREAK if len(before) + len(after) else math.log10(2.0)
    if rise < max(least, STRAIGHT * rms):
        return None
    for level, edge in ((before, line[0]), (after, line[-1])):
        # A saturating curve bends before it is level, so its last rung on the line may lie a little lower.
        if len(level) and (np.ptp(level) > LEVEL or abs(edge - level.mean()) > BREAK):
            return None
    squares = sum(float(np.sum((part - part.mean()) ** 2)) for part in (before, after) if len(part)) + np.sum(off**2)
    parameters = 2 + 2 * ((len(before) > 0) + (len(after) > 0))
    n = len(y)
    return n * math.log(squares / n + NOISE**2) + parameters * math.log(n), float(slope), rms, i, j
