"""mlxdet smoke, and the hidden verb it repeats a step with."""

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "metal", "cuda", "cpu"]),
              help="Device to run on.")  # fmt: skip
@click.option("--keep", metavar="DIR", help="Keep the runs in this new directory.")
@common
def smoke(device: str, keep: str | None, as_json: bool) -> int:
    """Prove on this machine that the same seed gives the same bits.

    Trains a small model a dozen times in fresh processes and compares losses, weights and moments. Takes about a
    minute. DETERMINISM_TOL (default 1e-2) is the largest same-seed difference of losses that its line lets pass; all
    the other lines compare bits. Exit 1 names what does not hold.

    \b
    Example:
      mlxdet smoke
    """
    from mlxdet.measure.commands import outputs
    from mlxdet.measure.smoke import smoke as run_checks

    checks = []
    with outputs(keep) as where:
        for check in run_checks(where, device):
            checks.append(check)
            if not as_json:
                click.echo(check.text if check.holds else f"{check.text}   <-- does not hold")
    failed = [check.name for check in checks if not check.holds]
    if as_json:
        print_json({"holds": not failed, "failed": failed, "checks": [check.as_dict() for check in checks]})
    else:
        click.echo(f"{len(failed)} of {len(checks)} do not hold: {', '.join(failed)}" if failed else "all hold")
    return 1 if failed else 0


@click.command(hidden=True)
@click.argument("run")
@click.argument("n", type=click.IntRange(2))
def repeat_step(run: str, n: int) -> None:
    """Repeat the next step of RUN N times and print JSON."""
    from mlxdet.measure.repeat import repeat_step as repeat
    from mlxdet.training.run import Run

    print_json(repeat(Run(run), n))
