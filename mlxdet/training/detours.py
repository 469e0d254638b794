"""What a run has been through besides its steps: updates withheld, and detours around spikes. Pure functions.

A rollback at a spike in step s returns to step `to` and trains steps to+1 .. s again on other data, at a learning rate
cut by a factor that comes back linearly over a ramp. It is part of the state: everything after it is a function of the
checkpoint and the detours so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 3  # rollbacks of a run; the next spike stops it


@dataclass(frozen=True)
class Detour:
    """A rollback: a spike in `step` sent the run back to the state after step `to`."""

    step: int
    to: int


@dataclass(frozen=True)
class Past:
    """Updates withheld so far, and the detours, oldest first."""

    skipped: int = 0
    detours: tuple[Detour, ...] = ()


FRESH = Past()


def target(step: int, detours: Sequence[Detour], back: int) -> int:
    """Return where a spike in `step` goes back to: the newest multiple of `back` that lies at least `back` before it.

    Never before where an earlier detour began, and never dependent on which checkpoints happen to exist.
    """
    newest = back * ((step - back) // back)
    return max(newest, detours[-1].to if detours else 0, 0)


def detour_at(detours: Sequence[Detour], step: int) -> int:
    """Return the number (from 1) of the last detour whose data `step` reads, 0 for the run's usual data."""
    return max((i for i, d in enumerate(detours, 1) if d.to < step <= d.step), default=0)


def factor_at(detours: Sequence[Detour], step: int, factor: float, ramp: int) -> float:
    """Return what the learning rate of `step` is multiplied by: `factor` after a detour, back to 1 in `ramp` steps."""
    return math.prod(factor + (1 - factor) * min(1.0, (step - d.to - 1) / ramp) for d in detours if d.to < step)
