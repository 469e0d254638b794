"""Twins and ladders for people: tables, the tensors that moved, and what does not hold."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from mlxdet.formats.source import escape
from mlxdet.measure.compare import TensorDifference
from mlxdet.measure.ladder import Ladder
from mlxdet.measure.twin import Pair, Twin
from mlxdet.report.tables import plain, put, say, show

SHOWN = 10  # tensors that moved


def print_twin(twin: Twin, console: Console) -> None:
    """Print the repetitions, the distances, what moved and why, and the result."""
    console.print(_repetitions(twin))
    console.print()
    say(console, f"identical: {twin.identical} of {twin.n}, all tensors bit for bit")
    missed = "" if twin.floor is not None and twin.floor <= twin.tol else ": no"
    say(console, f"floor: largest same-command relFro {_number(twin.floor)} (<= {twin.tol:g}){missed}")
    if twin.different is not None:
        distance = twin.different.model_distance
        ratio = _ratio(twin.separation)
        missed = "" if distance is not None and distance >= twin.min_different else ": no"
        say(console, f"the other command: relFro {_number(distance)} (>= {twin.min_different:g}){missed}, {ratio}")
    for cause in dict.fromkeys(twin.causes.values()):
        say(console, cause)
    for name, c in twin.pairs[0].parts.items():
        if c.total.nan_a or c.total.inf_a:
            odd = f"{c.total.nan_a} NaN and {c.total.inf_a} infinite slots in run {twin.pairs[0].a}"
            say(console, f"{plain(name)}: {odd}")
    for name in sorted({name for pair in twin.pairs for name in pair.files}):
        same = 1 + sum(p.files.get(name, False) for p in twin.pairs if p.a == twin.repetitions[0].name)
        gate = "" if twin.gate_files else ", not gated (--files gates it)" if same < twin.n else ""
        say(console, f"file {plain(name)}: {same} of {twin.n} equal{gate}")
    print_moved(twin.moved, console)
    print_result(twin.failed, console)


def _repetitions(twin: Twin) -> Table:
    labels = _labels([name for pair in twin.pairs for name in pair.parts])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    table.add_column("seconds", justify="right")
    if any(str(r.setting) for r in twin.repetitions):
        table.add_column("set", overflow="fold")
    table.add_column("relFro from the first", overflow="fold")
    first = twin.repetitions[0].name
    against = {pair.b: pair for pair in twin.pairs if pair.a == first}
    if twin.different is not None:
        against["different"] = twin.different
    for repetition in [*twin.repetitions, *([twin.other] if twin.other else [])]:
        pair = against.get(repetition.name)
        row = [repetition.name, f"{repetition.seconds:.1f}"]
        if len(table.columns) == 4:
            row.append(str(repetition.setting) or "-")
        put(table, *row, "" if pair is None else _parts(pair, labels))
    return table


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Return what parts are called in a table: without the checkpoint if there is only one, "" for the only part."""
    parts = list(dict.fromkeys(names))
    if len(parts) == 1:
        return {parts[0]: ""}
    split = {name: name.removesuffix(")").rpartition(" (") for name in parts}
    one = len({checkpoint for checkpoint, _, _ in split.values()}) == 1 and all(mark for _, mark, _ in split.values())
    return {name: split[name][2] if one else plain(name) for name in parts}


def _parts(pair: Pair, labels: dict[str, str]) -> str:
    if pair.identical:
        return "identical"
    moved = {labels.get(name, plain(name)): c.total.relfro for name, c in pair.parts.items() if not c.identical}
    told = [f"{label} {_number(distance)}".strip() for label, distance in moved.items()]
    return ", ".join(told + [f"{plain(name)} on one side only" for name in pair.one_sided])


def print_moved(moved: Sequence[tuple[str, TensorDifference]], console: Console) -> None:
    """Print the worst of the tensors that moved, with their groups."""
    if not moved:
        return
    labels = _labels(part for part, _ in moved)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("moved", *(["in"] if len(labels) > 1 else []), "group"):
        table.add_column(name, overflow="fold")
    table.add_column("relFro", justify="right", no_wrap=True)
    for part, tensor in moved[:SHOWN]:
        where = [labels[part]] if len(labels) > 1 else []
        put(table, plain(tensor.name), *where, plain(tensor.group), _number(tensor.relfro))
    groups = len({(part, tensor.group) for part, tensor in moved})
    show(console, table)
    rest = f"and {len(moved) - SHOWN} more; " if len(moved) > SHOWN else ""
    say(console, f"{rest}{_count(len(moved), 'tensor')} moved, in {_count(groups, 'group')}")


def print_ladder(ladder: Ladder, console: Console) -> None:
    """Print a row for each rung, how the distance grows, what moved where the trend breaks, and the result."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, width in (("step", 4), ("relFro", 9), ("max_abs", 9), ("moved", 5)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("1e-12 .. 1", width=WIDTH, min_width=WIDTH, no_wrap=True)
    table.add_column("worst", overflow="fold")
    odd = [rung for rung in ladder.rungs if rung.step in ladder.growth.anomalies]
    for rung in ladder.rungs:
        row = [str(rung.step), _number(rung.relfro), _number(rung.max_abs), str(len(rung.moved)), _bar(rung.relfro)]
        worst = "".join(f"{_number(t.relfro)} {plain(t.name)}" for t in rung.moved[:1])
        put(table, *row, f"<-- {worst}" if rung in odd else worst)
    console.print(table)
    console.print()
    say(console, str(ladder.growth))
    for rung in odd:
        names = ", ".join(f"{plain(t.name)} {_number(t.relfro)}" for t in rung.moved[:SHOWN])
        rest = f" and {len(rung.moved) - SHOWN} more" if len(rung.moved) > SHOWN else ""
        say(console, f"step {rung.step} breaks the trend; there moved: {names}{rest}")
    print_result(ladder.failed, console)


def print_result(failed: Sequence[str], console: Console) -> None:
    """Print what does not hold, or that all holds."""
    for line in failed:
        say(console, escape(f"does not hold: {line}"))
    if not failed:
        say(console, "holds")


WIDTH = 12  # one column a decade, from 1e-12 to 1


def _bar(distance: float | None) -> str:
    """Return a bar as long as the logarithm of a distance."""
    if distance is None or not distance:
        return ""
    return "█" * max(1, min(WIDTH, round(math.log10(distance) + 12)))


def _number(value: float | None) -> str:
    return "undefined" if value is None or not math.isfinite(value) else f"{value:.3g}" if value else "0"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _ratio(separation: float | None) -> str:
    if separation is None:
        return "no ratio"
    return "over a floor of 0" if math.isinf(separation) else f"{separation:.2g} times the floor"
