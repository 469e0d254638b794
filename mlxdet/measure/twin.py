"""Run the same command twice first: do its repetitions give the same model, and does another seed give another?

The distance between repetitions is the floor: an effect of its size is none. It means something only beside the
distance that another seed makes, so that is measured as well, by a command the user gives: a gate that no run can trip
proves nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from filecmp import cmp
from itertools import combinations
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.formats.source import quote
from mlxdet.measure.commands import Written, check_command, outputs, run, written
from mlxdet.measure.compare import DIFFERENT, SAME, Comparison, TensorDifference, compare
from mlxdet.measure.perturb import Setting, settings


@dataclass(frozen=True)
class Pair:
    """What two repetitions `a` and `b` (their names) wrote, compared part by part, and their other files.

    `model` names the parts that are weights, `one_sided` the paths that only one of them wrote. `files` tells of each
    other file whether its bytes are equal. `unread` names what could not be read, in files that are not equal.
    """

    a: str
    b: str
    parts: Mapping[str, Comparison]
    model: frozenset[str]
    one_sided: tuple[str, ...]
    files: Mapping[str, bool]
    unread: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether every tensor has the same bits."""
        return (
            not self.one_sided and not self.unread and all(comparison.identical for comparison in self.parts.values())
        )

    @property
    def faults(self) -> list[str]:
        """What keeps the pair from having a distance."""
        found = [f"{name}: written by one of them only" for name in self.one_sided]
        found += [f"{name}: cannot be read, and the files are not equal" for name in self.unread]
        for name, c in self.parts.items():
            for what in ("missing", "extra", "reshaped", "retyped"):
                tensors = [t if isinstance(t, str) else t[0] for t in getattr(c, what)]
                if tensors:
                    found.append(f"{name}: {len(tensors)} tensors {what}, the first {quote(tensors[0])}")
            if c.total.undefined:
                found.append(f"{name}: no distance, as {c.total.undefined}")
        return found

    @property
    def distance(self) -> float:
        """The largest relFro of all parts; infinite where one has none."""
        return math.inf if self.faults else max((_relfro(c) for c in self.parts.values()), default=0.0)

    @property
    def model_distance(self) -> float | None:
        """The largest relFro of the parts that are weights; None where one has none."""
        found = [self.parts[name].total.relfro for name in self.parts if name in self.model]
        return None if self.faults or not found or None in found else max(d for d in found if d is not None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "identical": self.identical,
            "relFro": None if math.isinf(self.distance) else self.distance,
            "faults": self.faults,
            "model_relFro": self.model_distance,
            "parts": {
                name: {"verdict": c.verdict, "moved": len(c.moved), "tensors": len(c.tensors), **c.total.as_dict()}
                for name, c in self.parts.items()
            },
            "files": dict(self.files),
        }


def _relfro(comparison: Comparison) -> float:
    value = comparison.total.relfro
    return math.inf if value is None else value


@dataclass(frozen=True)
class Repetition:
    """One run of the command: `name` is "1", "2", ... or "different"."""

    name: str
    setting: Setting
    seconds: float
    out: Path


@dataclass(frozen=True)
class Twin:
    """The repetitions, every pair of them, the pair of the first with the other seed, and what does not hold."""

    repetitions: Sequence[Repetition]
    pairs: Sequence[Pair]
    other: Repetition | None
    different: Pair | None
    tol: float
    min_different: float
    exact: bool = False
    gate_files: bool = False
    causes: Mapping[str, str] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.repetitions)

    @property
    def identical(self) -> int:
        """How many repetitions have the bits of the first, itself included."""
        first = self.repetitions[0].name
        return 1 + sum(pair.identical for pair in self.pairs if pair.a == first)

    @property
    def floor(self) -> float:
        """The largest distance of two repetitions of the same command; infinite where one has none."""
        return max(pair.distance for pair in self.pairs)

    @property
    def separation(self) -> float | None:
        """How many times farther away the other seed is; None without one, infinite over a floor of 0."""
        if self.different is None or self.different.model_distance is None or math.isinf(self.floor):
            return None
        return math.inf if self.floor == 0 else self.different.model_distance / self.floor

    @property
    def moved(self) -> list[tuple[str, TensorDifference]]:
        """(part, difference) of the tensors that ever moved, each at its largest: weights first, then the worst."""
        worst: dict[tuple[str, str], TensorDifference] = {}
        for pair in self.pairs:
            for part, comparison in pair.parts.items():
                for tensor in comparison.moved:
                    known = worst.get((part, tensor.name))
                    if known is None or size(tensor) > size(known):
                        worst[part, tensor.name] = tensor
        found = [(part, tensor) for (part, _), tensor in worst.items()]
        model = frozenset().union(*(pair.model for pair in self.pairs))
        return sorted(found, key=lambda at: (at[0] not in model, -size(at[1]), at[0], at[1].name))

    @property
    def failed(self) -> list[str]:
        """What does not hold, one line each."""
        found: list[str] = []
        told: set[frozenset[str]] = set()
        for pair in self.pairs:
            who = f"{pair.a} and {pair.b}"
            if self.gate_files:
                found += [f"{who}: {name} is not the same (--files)" for name, equal in pair.files.items() if not equal]
            alike = frozenset((self._original(pair.a), self._original(pair.b)))
            if alike in told:
                continue  # a pair of the same bits was told of already
            told.add(alike)
            found += [f"{who}: {fault}" for fault in pair.faults]
            if self.exact and not pair.identical:
                found.append(f"{who}: not the same bits (--exact)")
            elif not pair.faults and not pair.distance <= self.tol:
                found.append(f"{who}: relFro {pair.distance:.3g} is above --tol {self.tol:g}")
        if self.different is not None:
            distance = self.different.model_distance
            if distance is None:
                reasons = "; ".join(self.different.faults) or "nothing that could move was written"
                found.append(f"the other command: cannot be compared: {reasons}")
            elif not distance >= self.min_different:
                found.append(
                    f"this gate could not fail: the other command moves the model by only relFro {distance:.3g}, less "
                    f"than --min-different {self.min_different:g}"
                )
        return found

    def _original(self, name: str) -> str:
        """Return the first repetition that has the bits of this one."""
        return next((pair.a for pair in self.pairs if pair.b == name and pair.identical), name)

    @property
    def holds(self) -> bool:
        return not self.failed

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON. A distance that is undefined is null, a ratio over a floor of 0 too."""
        separation = self.separation
        return {
            "holds": self.holds,
            "failed": self.failed,
            "n": self.n,
            "identical": self.identical,
            "floor": None if math.isinf(self.floor) else self.floor,
            "different": None if self.different is None else self.different.model_distance,
            "separation": None if separation is None or math.isinf(separation) else separation,
            "tol": self.tol,
            "min_different": self.min_different,
            "causes": dict(self.causes),
            "moved": [{"part": p, "name": t.name, "group": t.group, "relFro": t.relfro} for p, t in self.moved],
            "repetitions": [
                {"name": r.name, "kind": r.setting.kind, "variables": dict(r.setting.variables), "seconds": r.seconds}
                for r in [*self.repetitions, *([self.other] if self.other else [])]
            ],
            "pairs": [pair.as_dict() for pair in self.pairs],
            "other_pair": None if self.different is None else self.different.as_dict(),
        }


def size(tensor: TensorDifference) -> float:
    """Return the distance of a tensor for an order; one without a distance counts as infinitely far."""
    return math.inf if tensor.relfro is None else tensor.relfro


def compare_written(a: str, one: Written, b: str, two: Written) -> Pair:
    """Return the comparison of what two repetitions wrote."""
    one_sided = (one.parts.keys() ^ two.parts.keys()) | (one.files.keys() ^ two.files.keys())
    parts: dict[str, Comparison] = {}
    unread: list[str] = []
    for name in [name for name in one.parts if name in two.parts]:
        x, y = one.parts[name].checkpoint, two.parts[name].checkpoint
        if x.unread or y.unread:
            # What no reader can turn into tensors is the same if the whole files are.
            equal = x.path.is_file() and y.path.is_file() and cmp(x.path, y.path, shallow=False)
            unread += [] if equal else [f"{name}: {quote(what)}" for what in sorted({*x.unread, *y.unread})]
            x, y = replace(x, unread=()), replace(y, unread=())
        if x.tensors or y.tensors:
            parts[name] = compare(x, y)
    files = {name: cmp(path, two.files[name], shallow=False) for name, path in one.files.items() if name in two.files}
    model = frozenset(name for name in parts if one.parts[name].weights)
    return Pair(a, b, parts, model, tuple(sorted(one_sided)), files, tuple(unread))


def twin(
    command: Sequence[str],
    *,
    reps: int = 2,
    different: Sequence[str] | None = None,
    perturb: Sequence[str] = (),
    tol: float = SAME,
    min_different: float = DIFFERENT,
    exact: bool = False,
    gate_files: bool = False,
    only: Sequence[str] = (),
    timeout: float | None = None,
    show: bool = False,
    keep: str | Path | None = None,
    watch: Callable[[Repetition], None] = lambda repetition: None,
) -> Twin:
    """Run `command` `reps` times, then once per perturbation, and `different` once; compare what they wrote.

    `{out}` in an argument stands for a fresh, empty directory of each run. `perturb` holds the kinds of
    `mlxdet.measure.perturb`; where only a perturbed repetition has other bits, it is run once more, then with each of
    its variables alone, and `causes` names those that explain it. `exact` demands equal bits, `gate_files` that the
    files which are no checkpoints are equal too; `only` keeps the paths that match a glob. `watch` is called after each
    run. Raises UsageError if the command cannot be started or writes nothing to compare, Fault if it fails or takes
    longer than `timeout` seconds, FormatError if a checkpoint that it wrote is damaged.
    """
    if reps < 2:
        raise UsageError(f"--reps: {reps} is too few; two repetitions make a pair")
    check_command(command, "twin")
    if different is not None:
        check_command(different, "--different")
    base, perturbed = settings(perturb)
    with outputs(keep) as where:

        def once(name: str, command: Sequence[str], setting: Setting) -> tuple[Repetition, Written]:
            what = f"repetition {name}" if name != "different" else "the other command"
            out, seconds = run(command, where / name, what, setting.variables, timeout, show)
            found = written(out, only)
            tensors = any(part.checkpoint.tensors for part in found.parts.values())
            if not tensors and not (gate_files and found.files):
                has = ", ".join(list(found.files)[:5]) or "nothing"
                matching = f" that matches {' or '.join(only)}" if only else ""
                raise UsageError(
                    f"{what} wrote no tensors{matching} into {{out}}, in no format that mlxdet reads; it holds {has}"
                )
            repetition = Repetition(name, setting, seconds, out)
            watch(repetition)
            return repetition, found

        done: list[tuple[Repetition, Written]] = []
        pairs: dict[tuple[str, str], Pair] = {}

        def repeat(setting: Setting) -> bool:
            """Run once more and compare with all before; return whether the bits are those of the first."""
            done.append(once(str(len(done) + 1), command, setting))
            (latest, found), earlier = done[-1], done[:-1]
            for before, was in earlier:
                pairs[before.name, latest.name] = compare_written(before.name, was, latest.name, found)
            return not earlier or pairs[done[0][0].name, latest.name].identical

        for _ in range(reps):
            repeat(base)
        causes: dict[str, str] = {}
        steady = all(pair.identical for pair in pairs.values())
        if perturbed and not steady:
            causes[""] = "the unperturbed runs differ already, so no difference can be laid to a perturbation"
        for setting in perturbed:
            if repeat(setting) or not steady:
                continue
            changed = done[-1][0].name
            repeat(setting)
            if not pairs[changed, done[-1][0].name].identical:
                causes[str(setting)] = f"differs with {setting}, and from itself: a difference that comes and goes"
                continue
            guilty = list(setting.variables)
            if len(guilty) > 1:
                alone = [Setting(setting.kind, {name: value}) for name, value in setting.variables.items()]
                guilty = [name for one in alone if not repeat(one) for name in one.variables] or guilty
            causes[str(setting)] = f"differs only where {' and '.join(guilty)} changed"
        other = once("different", different, base) if different is not None else None
        pair = compare_written(done[0][0].name, done[0][1], "different", other[1]) if other else None
        ordered = [pairs[a.name, b.name] for (a, _), (b, _) in combinations(done, 2)]
        return Twin([r for r, _ in done], ordered, other[0] if other else None, pair, tol, min_different, exact,
                    gate_files, causes)  # fmt: skip
