"""The command line of `python -m mlxdet.backends.cuda.check` and `python -m mlxdet.backends.metal.check`."""

import sys
from typing import Any, NoReturn

import click

from mlxdet.cli.options import Finite, check_new, write_new
from mlxdet.errors import MlxdetError
from mlxdet.measure.device_check import PARTS, check

HELP = """Try on this machine's GPU what mlxdet says about {device}.

Runs every program of the audit's catalogue (what is listed as racing should be seen to race, what is listed as safe
must repeat to the bit), every deterministic kernel against float64, a training step with and without deterministic
kernels, and `mlxdet smoke`; prints one table. Exit 0: all of it holds; 1: something does not, or was not run; 2: wrong
usage, or no {device} here.

\b
Example:
  python -m mlxdet.backends.{device}.check --out {device}.json
"""


def command(name: str, **options: Any) -> click.Command:
    """Return the command for the device `name`; `options` go to measure.device_check.check, for tests."""

    @click.command(help=HELP.format(device=name))
    @click.option("--only", "parts", type=click.Choice(PARTS), multiple=True, help="Run this part; repeatable.")
    @click.option("--quick", is_flag=True, help="A quarter of the time, fewer tries, small models; without smoke.")
    @click.option("--minutes", type=Finite(0.1), default=5.0, show_default=True,
                  help="Longest time it may take.")  # fmt: skip
    @click.option("--out", metavar="FILE.json", help="Write the result to this new file.")
    def run(parts: tuple[str, ...], quick: bool, minutes: float, out: str | None) -> None:
        try:
            sys.exit(_run(name, parts or PARTS, quick, minutes, out, options))
        except MlxdetError as error:
            click.echo(f"mlxdet: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("mlxdet: interrupted; nothing was written", err=True)
            sys.exit(130)

    return run


def _run(
    device: str, parts: tuple[str, ...], quick: bool, minutes: float, out: str | None, options: dict[str, Any]
) -> int:
    from mlxdet.report.device_check import show

    check_new("--out", out)
    settings = {"device": device, "parts": parts, "quick": quick, "minutes": minutes}
    result = check(**{**settings, "say": lambda text: click.echo(text, err=True), **options})
    show(result)
    write_new("--out", out, result.as_dict())
    return 0 if result.holds else 1


def main(device: str) -> NoReturn:
    """Run the check of `device` and exit the process."""
    command(device).main(prog_name=f"python -m mlxdet.backends.{device}.check")
    sys.exit(0)
