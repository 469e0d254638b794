"""The distance of two runs of one command, step by step: where it starts, and whether training makes it grow.

Three ways to the checkpoints of the rungs:

* mlxdet's own training, from its flags: one run saves at every rung. Rung 0 is a run of one step at learning rate 0,
  which leaves the weights as they were drawn.
* a command with {step}: one process for each rung
* a command without: it saves under {out} as it goes, and the step is in the names (`checkpoint-20/`, `step_20.pt`)
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.measure.commands import OUT, Written, check_command, outputs, run, written
from mlxdet.measure.compare import SAME, TensorDifference
from mlxdet.measure.growth import Growth, fit_growth
from mlxdet.measure.twin import Pair, compare_written, size

STEP = "{step}"
STEPS = (0, 5, 20, 50, 100)
TWINS = ("a", "b")
MOST = 200  # checkpoints that one run may leave


@dataclass(frozen=True)
class Rung:
    """The pair of runs at one step. Only weights count: the state of an optimizer shows in them a step later."""

    step: int
    pair: Pair

    @property
    def relfro(self) -> float | None:
        """The largest relFro of what belongs to the model; None where there is none."""
        return self.pair.model_distance

    @property
    def max_abs(self) -> float:
        return max((self.pair.parts[name].total.max_abs for name in self.pair.model), default=0.0)

    @property
    def moved(self) -> list[TensorDifference]:
        """The differences of the tensors that moved, the worst first."""
        found = [t for name in sorted(self.pair.model) for t in self.pair.parts[name].moved]
        return sorted(found, key=size, reverse=True)

    def as_dict(self, anomaly: bool) -> dict[str, Any]:
        return {
            "step": self.step,
            "relFro": self.relfro,
            "max_abs": self.max_abs if math.isfinite(self.max_abs) else None,
            "anomaly": anomaly,
            "faults": self.pair.faults,
            "moved": [{"name": t.name, "group": t.group, "relFro": t.relfro} for t in self.moved],
        }


@dataclass(frozen=True)
class Ladder:
    """The rungs, ascending, and how the distance grows over those that have one."""

    rungs: Sequence[Rung]
    growth: Growth
    tol: float

    @property
    def failed(self) -> list[str]:
        """What does not hold, one line each."""
        found = []
        for rung in self.rungs:
            found += [f"step {rung.step}: {fault}" for fault in rung.pair.faults]
            if rung.relfro is not None and not rung.relfro <= self.tol:
                found.append(f"step {rung.step}: relFro {rung.relfro:.3g} is above --tol {self.tol:g}")
        return found

    @property
    def holds(self) -> bool:
        return not self.failed

    def as_dict(self) -> dict[str, Any]:
        rungs = [rung.as_dict(rung.step in self.growth.anomalies) for rung in self.rungs]
        return {"holds": self.holds, "failed": self.failed, "tol": self.tol, "growth": self.growth.as_dict(),
                "rungs": rungs}  # fmt: skip


def parse_steps(text: str) -> list[int]:
    """Return the steps in a text like "0,5,20", ascending. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UsageError(f"--steps: {text!r} is not a list of steps such as 0,5,20")
    return sorted({int(word) for word in words})


def ladder(
    steps: Sequence[int] = STEPS,
    *,
    command: Sequence[str] | None = None,
    flags: Sequence[str] = (),
    trainer: Sequence[str] = (sys.executable, "-m", "mlxdet"),
    tol: float = SAME,
    only: Sequence[str] = (),
    timeout: float | None = None,
    show: bool = False,
    keep: str | Path | None = None,
    watch: Callable[[str, float], None] = lambda what, seconds: None,
) -> Ladder:
    """Run a training twice and compare the two at each of `steps`.

    `command` is a command with {out}, and {step} or not; without one, `flags` are those of `mlxdet train` (the number
    of steps, the cadence of saving and the directory are given here) and `trainer` the command line of mlxdet. `watch`
    is called after each process with its name and seconds. Raises as `mlxdet.measure.twin.twin` does, and UsageError
    where a rung has no checkpoint.
    """
    steps = sorted(set(steps))
    if not steps or steps[0] < 0:
        raise UsageError("--steps: name at least one step, from 0 up")
    if command is not None:
        check_command(command, "ladder")
    with outputs(keep) as where:

        def once(words: Sequence[str], name: str, step: str = "") -> Path:
            replaced = {STEP: step} if step else {}
            out, seconds = run(words, where / name, name, timeout=timeout, show=show, words=replaced)
            watch(name, seconds)
            return out

        found: dict[str, dict[int, Written]] = {}
        for side in TWINS:
            if command is None:
                found[side] = _own(once, [*trainer, "train", *flags], steps, side)
            elif any(STEP in argument for argument in command):
                found[side] = {s: written(once(command, f"{side}-{s}", str(s)), only) for s in steps}
            else:
                found[side] = by_step(written(once(command, side), only, every=True), steps)
            for step, at in found[side].items():
                if not any(part.weights and part.checkpoint.tensors for part in at.parts.values()):
                    raise UsageError(f"step {step}: run {side} wrote no checkpoint of a known format into {OUT}")
        rungs = [Rung(s, compare_written("a", found["a"][s], "b", found["b"][s])) for s in steps]
        measured = [(rung.step, rung.relfro) for rung in rungs if rung.relfro is not None]
        growth = fit_growth([s for s, _ in measured], [d for _, d in measured]) if measured else Growth("irregular")
        return Ladder(rungs, growth, tol)


def _own(once: Callable[..., Path], train: Sequence[str], steps: Sequence[int], side: str) -> dict[int, Written]:
    """Return the weights at `steps` of a training with mlxdet, which runs to the last of them."""
    found: dict[int, Written] = {}
    if steps[0] == 0:
        # No other rung needs this run: a step at learning rate 0 changes the moments, but not a weight.
        still = ["--steps", "1", "--max-lr", "0", "--min-lr", "0", "--warmup", "0", "--schedule", "constant"]
        found |= {0: _weights(by_step(written(once([*train, *still, "--out", OUT], f"{side}-0"), every=True), [1])[1])}
    later = [step for step in steps if step]
    if later:
        every = math.gcd(*later)
        if later[-1] // every > MOST:
            raise UsageError(
                f"--steps: to save at each of them takes {later[-1] // every} checkpoints, as training saves at even "
                f"distances (here {every}); choose steps with a larger common divisor"
            )
        cadence = ["--steps", str(later[-1]), "--save-every", str(every), "--keep", "0"]
        out = once([*train, *cadence, "--out", OUT], side)
        found |= {s: _weights(w) for s, w in by_step(written(out, every=True), later).items()}
    return found


def _weights(at: Written) -> Written:
    """Return the weights alone, under a name without the step."""
    (weights,) = [part for part in at.parts.values() if part.weights]
    return Written({"weights": weights}, {})


def by_step(all_of: Written, steps: Sequence[int]) -> dict[int, Written]:
    """Sort what a run wrote by the step in its names; each rung's step becomes {step} there.

    The number after "step" counts, else any whole number in the path. Raises UsageError where a rung has nothing, or
    where something could belong to two.
    """
    found: dict[int, dict[str, Any]] = {step: {} for step in steps}
    for name, part in all_of.parts.items():
        told = re.findall(r"(?i:step)[^0-9/]{0,2}([0-9]+)", name) or re.findall(r"[0-9]+", name)
        mine = sorted({int(number) for number in told} & set(steps))
        if len(mine) > 1:
            raise UsageError(f"{name}: belongs to step {mine[0]} or {mine[1]}? Write the step as step_N in its name")
        for step in mine:
            found[step][re.sub(rf"(?<![0-9])0*{step}(?![0-9])", STEP, name)] = part
    for step, parts in found.items():
        if not parts:
            has = ", ".join(list(all_of.parts)[:6]) or "no checkpoint"
            raise UsageError(
                f"step {step}: no checkpoint in {OUT} has this step in its name; it holds {has}. Save at every rung, "
                f"or take {STEP} into the command for one process per rung"
            )
    return {step: Written(parts, {}) for step, parts in found.items()}
