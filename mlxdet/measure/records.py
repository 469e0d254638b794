"""Two JSONL files, record by record: which fields differ, where first, and by how much from there on.

Both files are streamed side by side and matched by a key that rises from record to record, so a file may have any
length: what is kept is one summary per field.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mlxdet.measure.lines import Record, Records, distance, relative, same, spell

STRETCHES = 120  # of a growth curve, at most


@dataclass
class Growth:
    """The largest distance in each of at most STRETCHES equal stretches of records, however many there are."""

    width: int = 1
    stretches: list[list[Any]] = field(default_factory=list)  # [first key, last key, largest distance, records]

    def add(self, key: str, value: float) -> None:
        if not self.stretches or self.stretches[-1][3] == self.width:
            if len(self.stretches) == STRETCHES:
                pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
                self.stretches = [[x[0], y[1], max(x[2], y[2]), x[3] + y[3]] for x, y in pairs]
                self.width *= 2
            self.stretches.append([key, key, value, 0])
        stretch = self.stretches[-1]
        stretch[1:] = [key, max(stretch[2], value), stretch[3] + 1]


class Seen(NamedTuple):
    """Where a field was seen to differ: `key` as people read it, the two records, |a - b| if there is one."""

    key: str
    a: Record
    b: Record
    absolute: float | None

    def of(self, name: str) -> dict[str, Any]:
        """Return lines, values (as the files spell them, None where the field is missing) and distances."""
        x, y = self.a.fields, self.b.fields
        return {
            "key": self.key, "line_a": self.a.line, "line_b": self.b.line,
            "a": spell(x[name]) if name in x else None, "b": spell(y[name]) if name in y else None,
            "absolute": self.absolute, "relative": relative(x.get(name), y.get(name)),
        }  # fmt: skip


@dataclass
class FieldDifference:
    """One field over all records that both files have.

    `differing` of `compared` records are not equal, `lone` of these because only one file has the field there.
    `equal_again` counts equal records after the first difference. `largest` is None where values are not numbers.
    """

    name: str
    compared: int = 0
    differing: int = 0
    lone: int = 0
    equal_again: int = 0
    first: Seen | None = None
    largest: Seen | None = None
    last: Seen | None = None
    growth: Growth = field(default_factory=Growth)  # from the first difference on; equal records count as 0
    in_a: bool = False
    in_b: bool = False

    def equal(self, key: str) -> None:
        """Count a record in which both have the same."""
        self.compared += 1
        self.in_a = self.in_b = True
        if self.first is not None:
            self.equal_again += 1
            self.growth.add(key, 0.0)

    def add(self, key: str, a: Record, b: Record) -> None:
        """Compare the field in two records with the same key; at least one of them has it."""
        has_a, has_b = self.name in a.fields, self.name in b.fields
        if has_a and has_b and same(a.fields[self.name], b.fields[self.name]):
            self.equal(key)
            return
        self.in_a |= has_a
        self.in_b |= has_b
        self.compared += 1
        self.differing += 1
        self.lone += not (has_a and has_b)
        gap = distance(a.fields.get(self.name), b.fields.get(self.name))
        self.last = Seen(key, a, b, gap)
        self.first = self.first or self.last
        if gap is not None:
            self.growth.add(key, gap)
            if self.largest is None or gap > (self.largest.absolute or 0.0):
                self.largest = self.last

    def as_dict(self) -> dict[str, Any]:
        """Return what is reported, for JSON."""
        told: dict[str, Any] = {n: getattr(self, n) for n in ("compared", "differing", "lone", "equal_again")}
        told |= {n: seen.of(self.name) if (seen := getattr(self, n)) else None for n in ("first", "largest", "last")}
        names = ("from", "to", "largest", "records")
        return told | {"growth": [dict(zip(names, s, strict=True)) for s in self.growth.stretches]}


@dataclass
class Unmatched:
    """Records of one file without a partner in the other: `count` of them, keys `first` to `last`."""

    count: int = 0
    first: str | None = None
    last: str | None = None
    first_key: tuple[Any, ...] = ()

    def add(self, key: str, record: Record) -> None:
        if not self.count:
            self.first, self.first_key = key, record.key
        self.count, self.last = self.count + 1, key

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "first": self.first, "last": self.last}


@dataclass
class Side:
    """One of the two files: what it has and the other has not, by place. `gap`: between records that both have."""

    source: Records
    before: Unmatched = field(default_factory=Unmatched)
    gap: Unmatched = field(default_factory=Unmatched)
    after: Unmatched = field(default_factory=Unmatched)
    fields: list[str] = field(default_factory=list)  # that no common record of the other file has

    def as_dict(self) -> dict[str, Any]:
        source = self.source
        return {
            "path": str(source.path), "records": source.count, "first": source.first, "last": source.last,
            "torn_line": source.torn[0] if source.torn else None, "only_here_before": self.before.as_dict(),
            "only_here_between": self.gap.as_dict(), "only_here_after": self.after.as_dict(),
            "fields_only_here": self.fields,
        }  # fmt: skip


@dataclass
class RecordComparison:
    """Two JSONL files compared: `common` records with the same key; `fields` by name, in the order of the stages."""

    key: Sequence[str] | None
    a: Side
    b: Side
    common: int
    fields: dict[str, FieldDifference]

    @property
    def same_tails(self) -> bool:
        """Whether the cut-off last lines are the same bytes, or neither has one."""
        x, y = self.a.source.torn, self.b.source.torn
        return (x and x[1]) == (y and y[1])


def compare_records(
    path_a: str | Path, path_b: str | Path, key: Sequence[str] | None = None, fields: Sequence[str] = (),
    ignore: Iterable[str] = (), by_position: bool = False, absent: Mapping[str, Any] | None = None,
) -> RecordComparison:  # fmt: skip
    """Compare two JSONL files, streamed.

    `key`: fields whose values identify a record and rise from record to record (numbers by value, strings by code
    point); default "step" where the first record of both has it, else the position, as with `by_position`. `fields`:
    what to compare, in the order in which it is computed; default every field but the key and `ignore`, in the order
    of the files. A field that one of the files never has is listed, not compared. `absent`: values of fields for
    records that lack them. Raises FormatError for a line that is no record and a key that does not rise, UsageError
    for a file that cannot be read.
    """
    a, b = Side(Records(Path(path_a), absent)), Side(Records(Path(path_b), absent))
    if key is None and not by_position and a.source.has("step") and b.source.has("step"):
        key = ("step",)
    a.source.key = b.source.key = key
    leave = {*ignore, *(key or ())}
    table = {name: FieldDifference(name) for name in fields}
    common = 0
    for x, y in _merge(a, b):
        common += 1
        name = a.source.spell(x)
        if not fields:
            for n in chain(x.fields, y.fields):
                if n not in table and n not in leave:
                    table[n] = FieldDifference(n)
        equal = x.raw == y.raw
        for n, found in table.items():
            if equal and n in x.fields:
                found.equal(name)
            elif n in x.fields or n in y.fields:
                found.add(name, x, y)
    a.fields = [n for n, f in table.items() if f.in_a and not f.in_b]
    b.fields = [n for n, f in table.items() if f.in_b and not f.in_a]
    return RecordComparison(key, a, b, common, {n: f for n, f in table.items() if f.in_a and f.in_b})


def _merge(a: Side, b: Side) -> Iterator[tuple[Record, Record]]:
    """Yield the pairs with equal keys; note the others in their sides."""
    one, two = iter(a.source), iter(b.source)
    x, y = next(one, None), next(two, None)
    met = False
    while x is not None and y is not None:
        if x.key == y.key:
            met = True
            yield x, y
            x, y = next(one, None), next(two, None)
        elif x.key < y.key:
            (a.gap if met else a.before).add(a.source.spell(x), x)
            x = next(one, None)
        else:
            (b.gap if met else b.before).add(b.source.spell(y), y)
            y = next(two, None)
    for side, record, rest in ((a, x, one), (b, y, two)):
        while record is not None:
            side.after.add(side.source.spell(record), record)
            record = next(rest, None)
