"""Are two checkpoints the same model? Every tensor against its counterpart, in groups and in total, and a verdict.

identical: the same names, shapes, dtypes and bits. same: not more than `same` apart in relative Frobenius distance
(the last bits moved, the model did not). different: at least `different` apart. unclear: in between, or something has
no distance (a tensor that only one side has, NaN on one side, a zero reference): never a pass of either gate.

Distances of groups and of the whole are those of their floats. Integers are counters, ids and codes: beside weights of
0.02 a step counter of 10,000 would hide any difference, so they only count as equal or not, and two checkpoints whose
integers differ are not the same. Where there are no floats, integers are all there is to measure.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.formats import Checkpoint, Tensor, open_checkpoint
from mlxdet.formats.source import quote
from mlxdet.measure.names import Naming, grouping, pattern
from mlxdet.measure.numbers import Numbers, counted, if_identical, measure, total
from mlxdet.measure.trees import from_tree
from mlxdet.measure.values import INTEGERS

SAME, DIFFERENT = 1e-5, 0.1


@dataclass(frozen=True)
class TensorDifference:
    """One pair of tensors: `name` is the one they are compared under, `numbers` what was measured."""

    name: str
    group: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    numbers: Numbers

    @property
    def relfro(self) -> float | None:
        return self.numbers.relfro

    @property
    def max_abs(self) -> float:
        return self.numbers.max_abs

    @property
    def differing(self) -> int:
        return self.numbers.differing

    @property
    def slots(self) -> int:
        return self.numbers.slots

    @property
    def moved(self) -> bool:
        return self.numbers.differing > 0 or self.dtypes[0] != self.dtypes[1]

    @property
    def integer(self) -> bool:
        return all(dtype in INTEGERS for dtype in self.dtypes)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "group": self.group, "dtypes": list(self.dtypes), "shape": list(self.shape),
                **self.numbers.as_dict()}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints have in common and what not. `a` and `b` say where they come from."""

    a: str
    b: str
    tensors: list[TensorDifference]
    missing: list[str]  # in a only
    extra: list[str]  # in b only
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    retyped: list[tuple[str, str, str]]
    tied: list[str]  # what storages are shared on one side only, in words
    notes: list[str]  # what differs beside the tensors: formats, metadata; and what could not be read
    unread: list[str]
    same: float
    different: float
    per_tensor: bool
    total: Numbers = field(init=False)
    groups: dict[str, Numbers] = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[str, list[TensorDifference]] = {}
        for t in self.tensors:
            groups.setdefault(t.group, []).append(t)
        object.__setattr__(self, "groups", {name: _together(tensors) for name, tensors in groups.items()})
        object.__setattr__(self, "total", _together(self.tensors))

    @property
    def moved(self) -> list[TensorDifference]:
        """The tensors that are not identical, worst first: those without a distance, then by relFro, then by name."""
        moved = [t for t in self.tensors if t.moved]
        return sorted(moved, key=lambda t: (t.relfro is not None, -(t.relfro or 0.0), t.name))

    @property
    def worst(self) -> TensorDifference | None:
        """The tensor that moved furthest, or None if none has moved."""
        return next(iter(self.moved), None)

    @property
    def identical(self) -> bool:
        return self.verdict == "identical"

    @property
    def verdict(self) -> str:
        return self._judged[0]

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, in one line."""
        return self._judged[1]

    @property
    def _judged(self) -> tuple[str, str]:
        unmatched = {"missing in B": len(self.missing), "only in B": len(self.extra),
                     "of another shape": len(self.reshaped), "not read": len(self.unread)}  # fmt: skip
        gaps = ", ".join(f"{count} {what}" for what, count in unmatched.items() if count)
        if not self.tensors:
            return "unclear", f"no tensor was compared ({gaps or 'both are empty'})"
        if not self.moved and not gaps:
            return "identical", f"all bits of {counted(len(self.tensors), 'tensor')}"
        distance, what = self._distance
        if distance is None:
            return "unclear", f"no distance: {what}"
        size = f"{what} {distance:.3g}"
        if distance >= self.different:
            return "different", f"{size} >= {self.different:g}"
        if gaps:
            return "unclear", f"tensors without a counterpart: {gaps}; of the others: {size}"
        integers = [quote(t.name) for t in self.moved if t.integer and t.differing]
        if integers and distance <= self.same and not self._only_integers:
            return (
                "unclear",
                f"integers differ: {', '.join(integers[:5])}{', ...' if len(integers) > 5 else ''}; {size}",
            )
        if distance <= self.same:
            return "same", f"{size} <= {self.same:g}"
        return "unclear", f"{size} lies between {self.same:g} and {self.different:g}"

    @property
    def _only_integers(self) -> bool:
        return all(t.integer for t in self.tensors)

    @property
    def _distance(self) -> tuple[float | None, str]:
        worst = self.worst
        if not self.per_tensor or worst is None:
            return self.total.relfro, self.total.undefined or "relFro"
        if worst.relfro is None:
            return None, f"{quote(worst.name)}: {worst.numbers.undefined}"
        return worst.relfro, f"relFro of {quote(worst.name)}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything that was measured, for JSON."""
        return {
            "a": self.a, "b": self.b, "verdict": self.verdict, "reason": self.reason,
            "thresholds": {"same": self.same, "different": self.different}, "per_tensor": self.per_tensor,
            "total": self.total.as_dict(), "groups": {k: v.as_dict() for k, v in self.groups.items()},
            "moved": [t.name for t in self.moved], "tensors": [t.as_dict() for t in self.tensors],
            "missing": self.missing, "extra": self.extra,
            "reshaped": [{"name": n, "a": list(x), "b": list(y)} for n, x, y in self.reshaped],
            "retyped": [{"name": n, "a": x, "b": y} for n, x, y in self.retyped],
            "tied": self.tied, "unread": self.unread, "notes": self.notes,
        }  # fmt: skip


Comparable = str | os.PathLike[str] | Checkpoint | Mapping[str, Any] | Sequence[Any]


def compare(
    a: Comparable,
    b: Comparable,
    *,
    same: float = SAME,
    different: float = DIFFERENT,
    group: str | None = None,
    strip: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    only: str | None = None,
    per_tensor: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Compare two checkpoints (a is the reference): paths of any format, opened ones, or trees of arrays.

    A tree is nested dictionaries, lists and tuples of numpy, MLX or other arrays; names are joined by dots.
    `group` is a regular expression whose first group (or whole match) names a tensor's group; without it, the group is
    the module path up to the first number. `strip` prefixes and `rename` (old, new) pairs, tried as whole names and
    then as prefixes up to a dot, are applied to the names of both sides; `only` keeps the tensors whose name it
    matches somewhere. With `per_tensor` the verdict is that of the worst tensor instead of that of all together.
    `progress` is called with the tensors compared so far and their number.

    Raises FormatError for a file that cannot be read whole, and UsageError for what contradicts itself: thresholds out
    of order, two tensors mapped to one name, a mapping or filter that fits nothing.
    """
    if not 0 <= same <= different:
        raise UsageError(f"the thresholds must be 0 <= same <= different, not {same:g} and {different:g}")
    find_group = grouping(group)
    keep = pattern("--only", only) if only else None
    one, two = _opened(a, "a"), _opened(b, "b")
    naming = Naming([strip] if isinstance(strip, str) else list(strip), list(rename))
    names_a, names_b = naming.of(one), naming.of(two)
    naming.check()
    if keep is not None:
        names_a, names_b = ({n: o for n, o in names.items() if keep.search(n)} for names in (names_a, names_b))
        if not names_a and not names_b:
            raise UsageError(f"--only {only}: no tensor has such a name")
    tied, standing_in = _tied(one, two, names_a, names_b)
    tensors: list[TensorDifference] = []
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    retyped: list[tuple[str, str, str]] = []
    alike: list[int] = []
    common = sorted(names_a.keys() & names_b.keys())
    for done, name in enumerate(common):
        progress(done, len(common))
        x, y = one.tensors[names_a[name]], two.tensors[names_b[name]]
        if x.dtype != y.dtype:
            retyped.append((name, x.dtype, y.dtype))
        if x.shape != y.shape:
            reshaped.append((name, x.shape, y.shape))
            continue
        numbers = _numbers(x, y)
        if numbers.identical and x.dtype == y.dtype:
            alike.append(len(tensors))
        tensors.append(TensorDifference(name, find_group(name), (x.dtype, y.dtype), x.shape, numbers))
    if len(alike) < len(tensors):
        # Distances are relative to the whole, so the size of what is identical counts as well.
        for i in alike:
            t = tensors[i]
            data = one.tensors[names_a[t.name]].data
            numbers = measure(t.dtypes[0], data, t.dtypes[0], data)
            tensors[i] = TensorDifference(t.name, t.group, t.dtypes, t.shape, numbers)
    missing = [n for n in sorted(names_a.keys() - names_b.keys()) if n not in standing_in]
    extra = [n for n in sorted(names_b.keys() - names_a.keys()) if n not in standing_in]
    return Comparison(
        str(one.path), str(two.path), tensors, missing, extra, reshaped, retyped, tied, _notes(one, two),
        [f"{side}: {quote(n)}" for side, c in (("A", one), ("B", two)) for n in c.unread],
        same, different, per_tensor,
    )  # fmt: skip


def assert_identical(a: Comparable, b: Comparable, **options: Any) -> None:
    """Raise AssertionError unless a and b are identical to the bit, naming the worst tensor. Options as `compare`."""
    found = compare(a, b, **options)
    if found.identical:
        return
    lines = [f"not identical: {found.verdict} ({found.reason})"]
    for what, names in (("missing in b", found.missing), ("only in b", found.extra)):
        if names:
            lines.append(f"{what}: {', '.join(quote(n) for n in names[:5])}{', ...' if len(names) > 5 else ''}")
    lines += [f"{quote(n)}: shape {x} / {y}" for n, x, y in found.reshaped[:5]]
    lines += [f"{quote(n)}: dtype {x} / {y}" for n, x, y in found.retyped[:5]]
    worst = found.worst
    if worst is not None:
        n = worst.numbers
        distance = f"relFro {n.relfro:.3g}" if n.relfro is not None else f"no distance ({n.undefined})"
        lines.append(
            f"{len(found.moved)} of {len(found.tensors)} tensors moved, worst {quote(worst.name)}: {distance}, "
            f"max_abs {n.max_abs:.3g}, {n.differing} of {n.slots} slots"
        )
    raise AssertionError("\n".join(lines))


def _together(tensors: Sequence[TensorDifference]) -> Numbers:
    measured = all(t.integer for t in tensors)
    return total(t.numbers if measured or not t.integer else t.numbers.counts() for t in tensors)


def _numbers(x: Tensor, y: Tensor) -> Numbers:
    a, b = x.data, y.data  # read once: a compressed or checked tensor is made anew at each reading
    if x.dtype == y.dtype:
        found = if_identical(x.dtype, a, b)
        if found is not None:
            return found
    return measure(x.dtype, a, y.dtype, b)


def _opened(source: Comparable, side: str) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    return open_checkpoint(source) if isinstance(source, (str, os.PathLike)) else from_tree(source, f"tree {side}")


def _tied(
    one: Checkpoint, two: Checkpoint, names_a: dict[str, str], names_b: dict[str, str]
) -> tuple[list[str], set[str]]:
    """Return what to say about shared storages, and the names that only one side has but that are tied to a common one.

    Such a name (a head that one file stores beside the embedding it is tied to and the other leaves out) is no gap:
    its content is compared under the other name.
    """
    lines: list[str] = []
    standing_in: set[str] = set()
    ties_a, ties_b = (
        {frozenset(n for n, original in names.items() if original in group) for group in c.tied}
        for c, names in ((one, names_a), (two, names_b))
    )
    for side, ties, other in (("A", ties_a - ties_b, names_b), ("B", ties_b - ties_a, names_a)):
        for group in sorted((g for g in ties if len(g) > 1), key=sorted):
            present = sorted(n for n in group if n in other)
            absent = sorted(n for n in group if n not in other)
            text = f"{' = '.join(quote(n) for n in sorted(group))}: tied in {side} only"
            if absent and present:
                standing_in |= set(absent)
                text += f"; the other side has {', '.join(quote(n) for n in present)} alone"
            lines.append(text)
    return lines, standing_in


def _notes(one: Checkpoint, two: Checkpoint) -> list[str]:
    notes = [f"{side}: {note}" for side, c in (("A", one), ("B", two)) for note in c.notes]
    if one.format != two.format:
        notes.append(f"formats: {one.format} / {two.format}")
    x, y = one.metadata, two.metadata
    differing = sorted(k for k in x.keys() | y.keys() if k not in x or k not in y or x[k] != y[k])
    if differing:
        shown = ", ".join(quote(k) for k in differing[:8]) + (", ..." if len(differing) > 8 else "")
        notes.append(f"metadata differs in {len(differing)} of {len(x.keys() | y.keys())} fields: {shown}")
    return notes
