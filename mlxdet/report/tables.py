"""What the reports have in common: tables, numbers in cells, and text from files that must not drive the terminal."""

import os
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlxdet.formats.source import escape, quote

WIDE = 120  # columns of a report that goes into a pipe or a file, which have no width


def report_console() -> Console:
    """Return the console of a report: as wide as the terminal or COLUMNS, else WIDE."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=WIDE)


def plain(name: str) -> str:
    """Return a name as it is if a terminal can show it on one line, else quoted."""
    return name if name.isprintable() and name == name.strip() and name else quote(name)


def short(text: str, width: int) -> str:
    """Return `text` on one line, control characters escaped, cut to `width`; its end is kept."""
    safe = escape(text)
    return safe if len(safe) <= width else "..." + safe[3 - width :]


def number(value: float | str | None, form: str = ".3g") -> str:
    """Return a number for a cell; one that is spelled already stays as it is."""
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def table(*columns: str, left: int = 1, fold: bool = False) -> Table:
    """Return a table: the first `left` columns are text, the others numbers, on one line each unless `fold`."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        made.add_column(name, overflow="fold", justify="left" if i < left else "right", no_wrap=i >= left and not fold)
    return made


def put(made: Table, *cells: str) -> None:
    """Add a row. Cells are Text, as markup in the text of a corpus is no markup of ours."""
    made.add_row(*map(Text, cells))


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: no markup in it, and where it is too long only the terminal breaks it."""
    console.print(Text(text, style), soft_wrap=True)


def show(console: Console, made: Table, more: int = 0, what: str = "", spare: Sequence[str] = ()) -> None:
    """Print a table below an empty line, and how many rows (of `what`) are not in it.

    Where the console is too narrow, columns of `spare` are left out, the first ones first, and the last line says so.
    """
    left_out = []
    for name in spare:
        if Measurement.get(console, console.options.update(width=10_000), made).maximum <= console.width:
            break
        made = _without(made, name)
        left_out.append(name)
    console.print()
    console.print(made)
    if left_out:
        say(console, f"  too narrow for: {', '.join(left_out)} (a wider terminal or --json shows them)", "dim")
    if more > 0:
        say(console, f"  and {more} more{what and ' ' + what} (--top 0 shows all)", "dim")


def _without(made: Table, name: str) -> Table:
    kept = [c for c in made.columns if c.header != name]
    table = Table(box=None, pad_edge=False, header_style=made.header_style)
    for c in kept:
        table.add_column(c.header, overflow=c.overflow, justify=c.justify, no_wrap=c.no_wrap)
    for cells, row in zip(zip(*(c.cells for c in kept), strict=True), made.rows, strict=True):
        table.add_row(*cells, end_section=row.end_section)
    return table
