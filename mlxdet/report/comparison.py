"""A comparison of two checkpoints for people: what moved, worst first, by group and in total, and the verdict."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdet.formats.source import escape
from mlxdet.measure.compare import Comparison, TensorDifference
from mlxdet.measure.numbers import Numbers
from mlxdet.report.tables import number, plain, put, say, show, table

COLORS = {"identical": "bold green", "same": "green", "unclear": "yellow", "different": "bold red"}


def print_comparison(found: Comparison, console: Console, top: int) -> None:
    """Print `found`, with at most `top` tensors and groups (0: all)."""
    say(console, f"A  {escape(found.a)}\nB  {escape(found.b)}")
    moved = found.moved
    if moved:
        shown = moved[: top or None]
        made = _table("tensor", "dtype", "shape")
        for t in shown:
            put(made, plain(t.name), "/".join(dict.fromkeys(t.dtypes)), "x".join(map(str, t.shape)) or "0-d",
                *_cells(t.numbers))  # fmt: skip
        show(console, made, len(moved) - len(shown), "tensors that moved", ("max ulp", "dtype", "cosine", "shape"))
        groups = sorted(((k, v) for k, v in found.groups.items() if v.differing), key=_badness)
        if len(groups) > 1:
            _print_groups(console, groups, found, top)
    console.print()
    for line in _lines(found):
        say(console, escape(line))
    console.print(Text(found.verdict, COLORS[found.verdict]) + Text(f": {found.reason}"), soft_wrap=True)


def _print_groups(console: Console, groups: list[tuple[str, Numbers]], found: Comparison, top: int) -> None:
    made = _table("group")
    counts: dict[str, list[TensorDifference]] = {}
    for t in found.tensors:
        counts.setdefault(t.group, []).append(t)
    shown = groups[: top or None]
    for name, numbers in shown:
        moved = sum(t.moved for t in counts[name])
        put(made, f"{plain(name)}  ({moved} of {len(counts[name])})", *_cells(numbers))
    made.add_section()
    put(made, f"total  ({len(found.moved)} of {len(found.tensors)})", *_cells(found.total))
    show(console, made, len(groups) - len(shown), "groups that moved", ("max ulp", "cosine"))


def _badness(item: tuple[str, Numbers]) -> tuple[bool, float, str]:
    name, numbers = item
    return numbers.relfro is not None, -(numbers.relfro or 0.0), name


def _table(*first: str) -> Table:
    numbers = ("differing", "relFro", "max abs", "max ulp", "cosine")
    return table(*first, *numbers, left=len(first), fold=True)  # a narrow terminal must not cost a digit


def _cells(n: Numbers) -> list[str]:
    share = 100 * n.differing / n.slots if n.slots else 0.0
    share_text = f"{share:.2g}" if share < 99 else f"{share:.1f}"
    return [
        f"{n.differing} ({share_text}%)", "undefined" if n.relfro is None else f"{n.relfro:.3g}", f"{n.max_abs:.3g}",
        _ulp(n), number(n.cosine, ".6f"),
    ]  # fmt: skip


def _ulp(n: Numbers) -> str:
    if n.max_abs and not n.max_ulp:  # two dtypes have no common last place
        return "-"
    return str(n.max_ulp) if n.max_ulp < 10**6 else f"{n.max_ulp:.2g}"


def _by_dtypes(found: Comparison) -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for name, x, y in found.retyped:
        names.setdefault((x, y), []).append(plain(name))
    return names


def _lines(found: Comparison) -> list[str]:
    """Return what a table does not hold, a line each."""
    names = [f"missing in B: {plain(n)}" for n in found.missing] + [f"only in B: {plain(n)}" for n in found.extra]
    names += [f"reshaped: {plain(n)} {x} / {y}, not compared" for n, x, y in found.reshaped]
    for (x, y), same in _by_dtypes(found).items():
        told = same if len(same) <= 3 else [f"{len(same)} tensors"]
        names += [f"retyped: {what} {x} / {y}, compared by value" for what in told]
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
