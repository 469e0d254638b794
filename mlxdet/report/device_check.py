"""The device check as one table, what it ran on above it, and what it comes to below."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdet.formats.source import escape
from mlxdet.measure.device_check import Result
from mlxdet.measure.device_worker import FAILS, HOLDS, MEASURED, NOT_RUN, NOT_SEEN, NOTHING

STYLES = {FAILS: "bold red", NOT_RUN: "bold red", NOT_SEEN: "yellow"}
WIDTH = 140  # in a file or a log


def show(result: Result, console: Console | None = None) -> None:
    """Print the environment, the table and the sum of it."""
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    for line in facts(result):
        console.print(Text(line))
    table = Table(box=None, pad_edge=False)
    for name in ("part", "what", "rule", "claim", "verdict", "found"):
        table.add_column(name, overflow="fold", no_wrap=name != "found")
    for row in result.rows:
        cells = [row.part, row.name, row.rule or "", "" if row.claim == NOTHING else row.claim]
        table.add_row(*cells, Text(row.verdict, STYLES.get(row.verdict, "")), Text(escape(row.text)))
    console.print(table)
    for line in summary(result):
        console.print(Text(line))


def facts(result: Result) -> Iterator[str]:
    """Yield what was measured on: one line for each fact."""
    if result.rules != result.device:
        yield f"rules of {result.rules}, tried on {result.device}"
    for environment in list(result.environment.values())[:1]:
        for name, value in environment["decides"].items():
            if value:
                yield f"{name}: {_flat(value)}"
    for kernels, environment in result.environment.items():
        yield f"pins, {kernels} kernels: {_flat(environment['pins']) or 'none'}"


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {'not set' if v is None else _flat(v)}" for k, v in value.items())
    return escape(str(value))


def summary(result: Result) -> Iterator[str]:
    """Yield the verdict in a few lines, with all that was left out or cut."""
    counts = [f"{len(result.by(v))} {v}" for v in (HOLDS, FAILS, NOT_SEEN, NOT_RUN, MEASURED) if result.by(v)]
    yield f"{', '.join(counts)}; {sum(result.seconds.values()):.0f} s"
    if result.by(NOT_SEEN):
        names = ", ".join(row.name for row in result.by(NOT_SEEN))
        yield f"listed as racing and not seen to race, which proves nothing either way: {names}"
    cut = [row for row in result.rows if row.cut]
    if cut:
        least = min(cut, key=lambda row: row.n)
        yield (
            f"{len(cut)} had fewer evaluations than asked for, as time was up; fewest: {least.name}, {least.n} of "
            + (f"{least.asked}")
        )
    for part, why in result.left_out.items():
        yield f"left out: {part} ({why})"
    bad = [f"{row.part}: {row.name}" for row in result.by(FAILS, NOT_RUN)]
    yield f"does not hold or was not run: {', '.join(bad)}" if bad else "what was tried holds"
