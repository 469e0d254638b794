"""Where two logs part: the first record and, in it, the first stage that differs; and how far they go together."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.formats.source import bare, quote
from mlxdet.measure.records import RecordComparison, Side

MOST = 10**18  # steps


@dataclass(frozen=True)
class First:
    """The first difference.

    `at` is the record's key as people read it, `step` its number if the key is one. `fields` are the logged fields of
    this stage that differ there, as `FieldDifference.first`; `tensors` what differs at the checkpoint of this step, in
    the order of `CheckpointPair.moved`. `certain`: nothing unseen can have come before it. `reading` is what it means.
    `detour` counts the rollbacks before it.
    """

    at: str
    step: int | None
    stage: str
    label: str
    reading: str = ""
    certain: bool = True
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    detour: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies in the order of a run's log."""
        return self.detour, self.step or 0


def number(names: Sequence[str] | None, key: tuple[Any, ...]) -> int | None:
    """Return the step that a key names: its field "step", or its only part; None where that is no whole number."""
    if not key or not (names is None or "step" in names or len(names) == 1):
        return None
    place: Any = key[names.index("step") if names and "step" in names else 0]
    if isinstance(place, tuple):  # (kind, value) of a named field
        place = place[1]
    # A number beyond any step is not turned into an integer: 1e999999999 has a billion digits.
    return None if isinstance(place, str) or not -MOST < place < MOST or place != int(place) else int(place)


def _detour(names: Sequence[str] | None, key: tuple[Any, ...]) -> int:
    """Return how many rollbacks of a run came before the record with this key."""
    return number(("step",), (key[names.index("detour")],)) or 0 if names and "detour" in names else 0


def first_logged(log: RecordComparison, stage_of: Mapping[str, str], labels: Mapping[str, str]) -> First | None:
    """Return the first difference in what was logged: the earliest record, in it the earliest stage.

    `stage_of`: field -> stage, the stages in order. A record missing between two that both logs have comes before all
    stages of its step.
    """
    ranks = {stage: n for n, stage in enumerate(dict.fromkeys(stage_of.values()))}
    gaps: list[tuple[Any, int, Any]] = [(s.gap.first_key, -1, s) for s in (log.a, log.b) if s.gap.count]
    found = [(f.first.a.key, ranks[stage_of[n]], n) for n, f in log.fields.items() if f.first]
    if not gaps and not found:
        return None
    key, _, what = min([*gaps, *found], key=lambda f: f[:2])
    if isinstance(what, Side):
        have, lack = ("A", "B") if what is log.a else ("B", "A")
        more = f"; {what.gap.count} such records, the last {what.gap.last}" if what.gap.count > 1 else ""
        at = what.gap.first or ""
        reading = f"{have} has {at}, {lack} has not{more}"
        return First(at, number(log.key, key), "records", "a record is missing", reading, detour=_detour(log.key, key))
    stage = stage_of[what]
    here = {n: f.first for n, f in log.fields.items() if f.first and f.first.a.key == key and stage_of[n] == stage}
    fields = {n: seen.of(n) for n, seen in here.items()}
    label = labels.get(stage, f"field {quote(stage)}")
    at = fields[what]["key"]
    return First(at, number(log.key, key), stage, label, fields=fields, detour=_detour(log.key, key))


def length(log: RecordComparison) -> First | None:
    """Return the difference in length of two logs, None if they cover the same records to the last byte."""
    said, at, key = [], None, None
    for name, other, short, long in (("B", "A", log.b, log.a), ("A", "B", log.a, log.b)):
        torn = " (its last line is cut off)" if short.source.torn else ""
        for part, what in (
            (long.before, f"{name} starts at {short.source.first}, {other} at {long.source.first}"),
            (long.after, f"{name} stops at {short.source.last}{torn}, {other} goes on to {long.source.last}"),
        ):
            if part.count:
                said.append(what)
                at, key = (part.first, part.first_key) if at is None else (at, key)
    if not said and not log.same_tails:
        said, at, key = ["an unfinished last line is not the same in both"], log.a.source.last, log.a.source.last_key
    if not said:
        return None
    return First(at or "", number(log.key, key or ()), "length", "length", "; ".join(said))


def require_something(log: RecordComparison) -> None:
    """Refuse two logs without anything in common: equal where nothing was compared is no result."""
    for side in (log.a, log.b):
        if not side.source.count:
            torn = " but an unfinished line" if side.source.torn else ""
            raise UsageError(f"{side.source.path}: nothing to compare, it holds no record{torn}")
    x, y = log.a.source, log.b.source
    if not log.common:
        raise UsageError(
            f"nothing to compare: no record of {x.path} ({x.first} to {x.last}) has the key of one of {y.path} "
            f"({y.first} to {y.last})"
        )
    if not log.fields:
        only_a, only_b = (", ".join(map(quote, side.fields)) or "none" for side in (log.a, log.b))
        raise UsageError(
            f"nothing to compare: besides key and what is ignored, no field is in both {x.path} ({only_a}) and "
            f"{y.path} ({only_b})"
        )


def extent(log: RecordComparison) -> str:
    """Return what was compared, in words."""
    unit = "steps" if log.key and "step" in log.key else "records"
    return f"all {log.common:,} {unit}, fields {', '.join(map(bare, log.fields))}"


def remarks(log: RecordComparison) -> list[str]:
    """Return what a reader must know about the logs themselves."""
    x, y = log.a.source.path, log.b.source.path
    said = ["A and B are one and the same: this compares a file with itself"] if os.path.samefile(x, y) else []
    for name, side in (("A", log.a), ("B", log.b)):
        if side.source.torn:
            said.append(
                f"{side.source.path}:{side.source.torn[0]}: the last line is cut off (a crash?); it is no record"
            )
        if side.fields:
            said.append(f"only {name} has the fields {', '.join(map(quote, side.fields))}: not compared")
    return said


def opening(first: First) -> str:
    """Return the first difference in a few words."""
    if first.stage == "length":
        return f"{first.reading}; equal where both have records"
    return f"first {'' if first.certain else 'visible '}difference at {first.at}: {first.label}"
