"""mlxdet spikes."""

from typing import Any

import click

from mlxdet.cli.options import Finite, common, print_json
from mlxdet.training.spikes import FACTOR, MINIMUM, WINDOW


@click.command()
@click.argument("path", metavar="RUN")
@click.option("--spike-window", "window", type=click.IntRange(MINIMUM), metavar="N",
              help=f"Steps looked back on. Default: the run's; of another log {WINDOW}.")  # fmt: skip
@click.option("--spike-factor", "factor", type=Finite(1.0, 1e6), metavar="X",
              help=f"Robust deviations that make a spike. Default: the run's; else {FACTOR:g}.")  # fmt: skip
@common
def spikes(path: str, window: int | None, factor: float | None, as_json: bool) -> int:
    """List the steps of a run where loss or gradient norm jumped far above the steps before.

    RUN is a run, also one that is being trained now, or any file of JSON lines with a "loss" (and "step" and
    "grad_norm", if it has them). Exit code 0: no spike, 1: spikes.

    \b
    Example:
      mlxdet spikes runs/book
    """
    from mlxdet.report.spikes import find

    found = find(path, window, factor)
    if as_json:
        print_json({k: v for k, v in found.items() if k != "picture"})
    else:
        _show(found)
    return 1 if found["spikes"] else 0


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from mlxdet.report.tables import number, put, report_console, show

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
            put(table, str(s["step"]), number(s["loss"], ".4f"), number(s["loss_median"], ".4f"),
                number(s["loss_deviations"], "+.1f"), number(s["grad_norm"], ".4g"), number(s["norm_median"], ".4g"),
                number(s["norm_deviations"], "+.1f"), s["reason"])  # fmt: skip
    show(report_console(), table, spare=("median", "deviations"))
    count = sum(len(spike["steps"]) for spike in found["spikes"])
    n = len(found["spikes"])
    console.print(f"{n} spike{'s' if n > 1 else ''}, {count} step{'s' if count > 1 else ''}")
    for spike in found["spikes"]:
        first = spike["steps"][0]
        if "rows" in first:
            console.print(f"step {first['step']} read rows {', '.join(map(str, first['rows']))}")
    if found["run"]:
        step, detour = found["spikes"][0]["first"], found["spikes"][0]["steps"][0]["detour"]
        branch = f" --detour {detour}" if detour < found["rollbacks"] else ""
        console.print(f"`mlxdet batches {found['source']} --step {step}{branch}` shows what step {step} read")
