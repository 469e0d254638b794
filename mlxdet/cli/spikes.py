"""mlxdet spikes."""

from typing import Any

import click

from mlxdet.cli.options import common, print_json
from mlxdet.training.spikes import FACTOR, MINIMUM, WINDOW


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--spike-window", "window", type=click.IntRange(MINIMUM), default=WINDOW, show_default=True, metavar="N",
              help="Steps looked back on.")  # fmt: skip
@click.option("--spike-factor", "factor", type=click.FloatRange(1.0, 1e6), default=FACTOR, show_default=True,
              metavar="X", help="Robust deviations above the median that make a spike.")  # fmt: skip
@common
def spikes(path: str, window: int, factor: float, as_json: bool) -> int:
    """List the steps of a run where loss or gradient norm jumped far above the steps before.

    RUN is a run, also one that is being trained now, or any file of JSON lines with a "loss" (and "step" and
    "grad_norm", if it has them). Exit code 0: no spike, 1: spikes.

    \b
    Example:
      mlxdet spikes runs/book
    """
    from mlxdet.errors import UsageError
    from mlxdet.report.spikes import find

    if factor != factor:  # a range lets it through
        raise UsageError("--spike-factor: nan is not a number")
    found = find(path, window, factor)
    if as_json:
        print_json({k: v for k, v in found.items() if k != "picture"})
    else:
        _show(found)
    return 1 if found["spikes"] else 0


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    ignored = f" ({found['ignored']:,} lines without a loss left out)" if found["ignored"] else ""
    console.print(
        f"{found['source']}: {found['records']:,} steps{ignored}, window {found['window']}, factor {found['factor']:g}"
    )
    for line in filter(None, found["picture"]):
        console.print(f"loss {line}" if "^" not in line else f"     {line}")
    if not found["spikes"]:
        console.print("no spike")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("step", "loss", "median", "deviations", "grad norm", "median", "deviations"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True)
    for spike in found["spikes"]:
        for s in spike["steps"]:
            table.add_row(
                str(s["step"]), _number(s["loss"], ".4f"), _number(s["loss_median"], ".4f"),
                _number(s["loss_deviations"], "+.1f"), _number(s["grad_norm"], ".4g"), _number(s["norm_median"], ".4g"),
                _number(s["norm_deviations"], "+.1f"), s["reason"],
            )  # fmt: skip
    console.print(table, soft_wrap=False)
    count = sum(len(spike["steps"]) for spike in found["spikes"])
    n = len(found["spikes"])
    console.print(f"{n} spike{'s' if n > 1 else ''}, {count} step{'s' if count > 1 else ''}")
    for spike in found["spikes"]:
        first = spike["steps"][0]
        if "rows" in first:
            console.print(f"step {first['step']} read rows {', '.join(map(str, first['rows']))}")
    if found["run"]:
        step = found["spikes"][0]["first"]
        console.print(f"`mlxdet batches {found['source']} --step {step}` shows what step {step} read")


def _number(value: float | str | None, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)
