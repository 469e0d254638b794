"""A comparison of two checkpoints for people: what moved, worst first, by group and in total, and the verdict."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdet.formats.source import quote
from mlxdet.measure.compare import Comparison, TensorDifference
from mlxdet.measure.numbers import Numbers

COLORS = {"identical": "bold green", "same": "green", "unclear": "yellow", "different": "bold red"}


def plain(name: str) -> str:
    """Return a name as it is if a terminal can show it on one line, else quoted."""
    return name if name.isprintable() and name == name.strip() and name else quote(name)


def safe(line: str) -> str:
    """Return a line with everything escaped that a terminal would obey instead of showing."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def print_comparison(found: Comparison, console: Console, top: int) -> None:
    """Print `found`, with at most `top` tensors and groups (0: all)."""
    console.print(Text(f"A  {safe(found.a)}\nB  {safe(found.b)}"))
    moved = found.moved
    if moved:
        shown = moved[:top] if top else moved
        table = _table("tensor", "dtype", "shape")
        for t in shown:
            table.add_row(Text(plain(t.name)), "/".join(dict.fromkeys(t.dtypes)), "x".join(map(str, t.shape)) or "0-d",
                          *_cells(t.numbers))  # fmt: skip
        console.print()
        console.print(table)
        _rest(console, len(moved) - len(shown), "tensors that moved")
        groups = sorted(((k, v) for k, v in found.groups.items() if v.differing), key=_badness)
        if len(groups) > 1:
            shown_groups = groups[:top] if top else groups
            _print_groups(console, shown_groups, found)
            _rest(console, len(groups) - len(shown_groups), "groups that moved")
    console.print()
    for line in _lines(found):
        console.print(Text(safe(line)))
    console.print(Text(found.verdict, COLORS[found.verdict]) + Text(f": {found.reason}"), soft_wrap=True)


def _print_groups(console: Console, groups: list[tuple[str, Numbers]], found: Comparison) -> None:
    table = _table("group")
    counts: dict[str, list[TensorDifference]] = {}
    for t in found.tensors:
        counts.setdefault(t.group, []).append(t)
    for name, numbers in groups:
        moved = sum(t.moved for t in counts[name])
        table.add_row(Text(f"{plain(name)}  ({moved} of {len(counts[name])})"), *_cells(numbers))
    table.add_section()
    table.add_row(f"total  ({len(found.moved)} of {len(found.tensors)})", *_cells(found.total))
    console.print()
    console.print(table)


def _badness(item: tuple[str, Numbers]) -> tuple[bool, float, str]:
    name, numbers = item
    return numbers.relfro is not None, -(numbers.relfro or 0.0), name


def _rest(console: Console, count: int, what: str) -> None:
    if count > 0:
        console.print(Text(f"  and {count} more {what} (--top 0 shows all)", "dim"))


def _table(*first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in first:
        table.add_column(name, overflow="fold")
    for name in ("differing", "relFro", "max abs", "max ulp", "cosine"):
        table.add_column(name, justify="right", overflow="fold")  # a narrow terminal must not cost a digit
    return table


def _cells(n: Numbers) -> list[Any]:
    share = 100 * n.differing / n.slots if n.slots else 0.0
    share_text = f"{share:.2g}" if share < 99 else f"{share:.1f}"
    relfro, cosine = n.relfro, n.cosine
    return [
        f"{n.differing} ({share_text}%)", "undefined" if relfro is None else f"{relfro:.3g}", f"{n.max_abs:.3g}",
        str(n.max_ulp) if n.max_ulp < 10**6 else f"{n.max_ulp:.2g}", "-" if cosine is None else f"{cosine:.6f}",
    ]  # fmt: skip


def _lines(found: Comparison) -> list[str]:
    """Return what a table does not hold, a line each."""
    names = [f"missing in B: {plain(n)}" for n in found.missing] + [f"only in B: {plain(n)}" for n in found.extra]
    names += [f"reshaped: {plain(n)} {x} / {y}, not compared" for n, x, y in found.reshaped]
    names += [f"retyped: {plain(n)} {x} / {y}, compared by value" for n, x, y in found.retyped]
    names += [f"tied: {line}" for line in found.tied] + [f"not read: {name}" for name in found.unread]
    lines = names[:20] + ([f"and {len(names) - 20} more such lines (--json has all)"] if len(names) > 20 else [])
    for t in found.tensors:
        if t.moved and t.relfro is None and len(lines) < 30:
            lines.append(f"{plain(t.name)}: no distance, {t.numbers.undefined}")
    n = found.total
    counts = {"NaN": (n.nan_a, n.nan_b), "infinite": (n.inf_a, n.inf_b)}
    lines += [f"{what}: {x} slots in A, {y} in B" for what, (x, y) in counts.items() if x or y]
    if n.signed_zeros:
        lines.append(f"zeros with the other sign: {n.signed_zeros} slots")
    worst = found.worst
    if worst and worst.relfro is not None and worst.relfro > found.same and found.verdict == "same":
        lines.append(
            f"{plain(worst.name)} alone moved by {worst.relfro:.3g}: much for itself, little for the whole "
            "(--per-tensor judges the worst tensor)"
        )
    lines += [f"beside the tensors: {note}" for note in found.notes]
    return lines
