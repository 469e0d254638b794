"""Where two runs part, for people: the verdict, the values at the first difference, its growth, and the causes."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdet.formats.source import escape
from mlxdet.measure.checkpoints import CheckpointPair, spell
from mlxdet.measure.divergence import Divergence, value
from mlxdet.measure.parting import First
from mlxdet.measure.records import FieldDifference, Seen
from mlxdet.report.curves import sparkline
from mlxdet.report.tables import number, plain, put, show

CURVE = "log of the size"
SIZE = ".2e"


def print_divergence(found: Divergence, console: Console, top: int) -> None:
    """Print `found`, with at most `top` rows of a table (0: all)."""
    console.print(Text(f"A  {escape(found.a)}\nB  {escape(found.b)}"))
    console.print()
    color = "bold green" if found.identical else "bold red"
    console.print(Text(found.verdict, color) + Text(f": {found.headline.removeprefix('identical: ')}"))
    if found.first:
        _print_first(found.first, console)
    _print_growth(found, console)
    if found.checkpoints and found.first:
        _print_checkpoints(found.checkpoints, console, top)
        _print_tensors(next((c for c in found.checkpoints if not c.identical), None), console, top)
    _print_causes(found, console, top)
    if found.notes:
        console.print()
    for note in found.notes:
        console.print(Text(escape(f"- {note}")))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        side = "left" if i in (0, len(columns) - 1) else "right"
        table.add_column(name, overflow="fold", justify=side, no_wrap=name == CURVE)  # type: ignore[arg-type]
    return table


def _short(text: str | None, width: int = 40) -> str:
    if text is None:
        return "-"
    return text if len(text) <= width else f"{text[: width - 10]}...{text[-7:]}"


def _print_first(first: First, console: Console) -> None:
    if first.stage != "length" and first.reading:
        console.print(Text(first.reading))
    if first.fields:
        table = _table("field", "A", "B", "|A - B|", "relative", "line")
        for name, seen in first.fields.items():
            lines = seen["line_a"], seen["line_b"]
            put(table, plain(name), _short(seen["a"]), _short(seen["b"]), number(seen["absolute"], SIZE),
                number(seen["relative"], SIZE), "/".join(map(str, dict.fromkeys(lines))))  # fmt: skip
        show(console, table, spare=("relative", "|A - B|"))


def _print_growth(found: Divergence, console: Console) -> None:
    table = _table("from there on", "differing", "first", "largest", "last", "equal again", CURVE)
    for prefix, log in (("", found.log), ("validation ", found.validation)):
        for f in log.fields.values() if log else ():
            twin = log.fields.get(f.name.removesuffix("_hex")) if log else None
            if f.first and (twin is None or twin is f or twin.differing != f.differing):  # loss_hex says what loss says
                put(table, prefix + plain(f.name), *_growth(f))
    if table.row_count:
        show(console, table, spare=(CURVE, "last", "equal again"))


def _growth(f: FieldDifference) -> list[str]:
    def at(seen: Seen | None) -> str:
        if seen is None:
            return "-"
        size = "" if seen.absolute is None else f"{seen.absolute:{SIZE}} "
        return f"{size}at {seen.key.removeprefix('step ').partition(', windows ')[0]}"

    sizes = [s[2] for s in f.growth.stretches]
    logs = [math.log10(s) for s in sizes if s]
    # Equal records stand one decade below the smallest difference.
    curve = sparkline([math.log10(s) if s else min(logs) - 1 for s in sizes], 20) if logs else ""
    return [f"{f.differing:,} of {f.compared:,}", at(f.first), at(f.largest), at(f.last), f"{f.equal_again:,}", curve]


def _print_checkpoints(pairs: list[CheckpointPair], console: Console, top: int) -> None:
    """Print them from the last identical one before the first that differs; if none does, the newest."""
    turn = next((i for i, p in enumerate(pairs) if not p.identical), len(pairs) - top + 1)
    start = max(0, turn - 1) if top else 0
    shown = pairs[start : start + top] if top else pairs
    table = _table("checkpoint", "weights relFro", "weights moved", "moments moved", "verdict")
    for p in shown:
        moved = [f"{len(c.moved)} of {len(c.tensors)}" for c in (p.weights, p.optimizer)]
        verdict = "identical" if p.identical else f"weights {p.weights.verdict}"
        put(table, spell(p.place).removeprefix("step "), number(p.weights.total.relfro, SIZE), *moved, verdict)
    show(console, table, len(pairs) - len(shown))


def _print_tensors(pair: CheckpointPair | None, console: Console, top: int) -> None:
    if pair is None:
        return
    tensors = pair.tensors()
    groups: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault(tensor["group"], []).append(tensor)
    table = _table(f"moved at checkpoint {spell(pair.place).removeprefix('step ')}", "relFro", "max abs", "slots", "of")
    more = 0
    each = max(1, top // len(groups)) if top and groups else len(tensors)
    for group, listed in groups.items():
        for t in listed[:each]:
            slots = f"{t['differing']:,} of {t['slots']:,}"
            put(table, plain(t["name"]), number(t["relFro"], SIZE), number(t["max_abs"], SIZE), slots, group)
        more += max(0, len(listed) - each)
    for name, c in (("weights", pair.weights), ("moments", pair.optimizer)):
        odd = [*c.missing, *c.extra, *(n for n, _, _ in c.reshaped)]
        for tensor_name in odd[: top or None]:
            put(table, plain(tensor_name), "-", "-", "in one run only, or of another shape", name)
    if table.row_count:
        show(console, table, more)


def _print_causes(found: Divergence, console: Console, top: int) -> None:
    stage = found.first.stage if found.first else None
    decisive = [c for c in found.causes if c.decides]
    if decisive:
        table = _table("manifests differ in", "", "A", "B", "can be why")
        for c in decisive[: top or None]:
            answer = "-" if stage is None else "yes" if c.explains(stage) else "no"
            put(table, c.kind, plain(c.name), _short(value(c.a)), _short(value(c.b)), answer)
        show(console, table, len(decisive) - len(decisive[: top or None]))
    comfort = [f"{plain(c.name)} {_short(value(c.a))} / {_short(value(c.b))}" for c in found.causes if not c.decides]
    if comfort:
        console.print()
        console.print(Text(f"cannot change bits: {', '.join(comfort)}", "dim"))
