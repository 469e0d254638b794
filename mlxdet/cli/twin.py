"""mlxdet twin, mlxdet ladder."""

import shlex
import signal
from collections.abc import Callable
from typing import Any

import click

from mlxdet.cli.options import Finite, SectionedCommand, common, config_options, given, print_json
from mlxdet.measure.compare import DIFFERENT, SAME


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that both verbs have."""
    for option in (
        click.option("--keep", metavar="DIR", help="Keep all outputs in this new directory."),
        click.option("--show", is_flag=True, help="Show what the command prints, on stderr."),
        click.option("--timeout", type=Finite(0, min_open=True), metavar="SECONDS",
                     help="End a run that takes longer."),
        click.option("--only", multiple=True, metavar="GLOB", help="Look only at these paths below {out}; repeatable."),
        click.option("--tol", default=SAME, show_default=True, type=Finite(0), metavar="X",
                     help="Largest relFro of two runs of the command."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.option("--reps", default=2, show_default=True, type=click.IntRange(2), metavar="N",
              help="Repetitions with nothing perturbed.")  # fmt: skip
@click.option("--different", metavar="'COMMAND'", help="The command with another seed, in one string: it must differ.")
@click.option("--min-different", default=DIFFERENT, show_default=True, type=Finite(0, min_open=True), metavar="X",
              help="Least relFro that --different must reach.")  # fmt: skip
@click.option("--perturb", multiple=True, is_flag=False, flag_value="all", metavar="[KINDS]",
              help="Also run with what must not matter changed: hash, threads, schedule, locale (commas), all, or "
              "VARIABLE=VALUE; repeatable. Alone: all.")  # fmt: skip
@click.option("--exact", is_flag=True, help="Demand the same bits, not --tol.")
@click.option("--files", is_flag=True, help="Demand that files which are no checkpoints are the same too.")
@_shared
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@common
def twin(command: tuple[str, ...], different: str | None, files: bool, as_json: bool, **options: Any) -> int:
    """Run a command twice and compare what it wrote: the control that every comparison of models needs.

    {out} in COMMAND becomes a fresh, empty directory for each run. Every checkpoint file below it is compared, of any
    format mlxdet reads, matched by its path. Holds (exit 0) if each pair of runs is within --tol, and another seed,
    given by --different, is not.

    \b
    Examples:
      mlxdet twin -- mlxdet train --preset nano --steps 50 --seed 7 --out {out}
      mlxdet twin --perturb hash,threads --different 'python train.py --seed 8 --out {out}' \\
          -- python train.py --seed 7 --out {out}
    """
    from mlxdet.measure.twin import Repetition
    from mlxdet.measure.twin import twin as measure

    def watch(repetition: Repetition) -> None:
        what = "the other command" if repetition.name == "different" else f"run {repetition.name}"
        click.echo(f"{what}: {repetition.seconds:.1f} s", err=True)

    words = _split(different)
    with _terminable():
        result = measure(command, different=words, gate_files=files, watch=watch, **options)
    if as_json:
        print_json(result.as_dict())
    else:
        from mlxdet.report.tables import report_console
        from mlxdet.report.twin import print_twin

        print_twin(result, report_console())
    return 0 if result.holds else 1


def _split(text: str | None) -> list[str] | None:
    from mlxdet.errors import UsageError

    try:
        return None if text is None else shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--different: {error}; quote it as for a shell") from None


class _terminable:
    """SIGTERM, and the end of the terminal, do as Ctrl-C: the command is ended and what it wrote is removed."""

    def __enter__(self) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        self.before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:  # of nohup
                signal.signal(number, interrupt)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@click.command(cls=SectionedCommand)
@click.option("--steps", default="0,5,20,50,100", show_default=True, metavar="LIST", help="The rungs.")
@click.option("--config", "file", metavar="FILE.toml", help="Read settings from a TOML file; flags win over it.")
@_shared
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@common
@config_options()
def ladder(
    steps: str, file: str | None, command: tuple[str, ...], tol: float, only: tuple[str, ...], timeout: float | None,
    show: bool, keep: str | None, as_json: bool, **options: Any,
) -> int:  # fmt: skip
    """Run a training twice and compare the two step by step: does a difference stay at rounding, or grow?

    Without COMMAND, mlxdet trains, with the flags of `mlxdet train`, to the last of --steps. A COMMAND that holds
    {step} is run for each rung; one that does not must save at every rung, with the step in the name (step_20.pt,
    checkpoint-20/...). {out} becomes a fresh directory. Holds (exit 0) if every rung is within --tol.

    \b
    Examples:
      mlxdet ladder --preset nano --seed 7
      mlxdet ladder --steps 10,100 -- python train.py --seed 7 --steps {step} --out {out}
    """
    from mlxdet.config import flag
    from mlxdet.errors import UsageError
    from mlxdet.measure.ladder import ladder as measure
    from mlxdet.measure.ladder import parse_steps

    settings = given(options)
    if command and (settings or file):
        odd = flag(next(iter(settings))) if settings else "--config"
        raise UsageError(f"{odd}: belongs to mlxdet's own training; with a COMMAND write it into the command")
    flags = ["--config", file] if file else []
    for name, value in settings.items():
        for one in value if isinstance(value, tuple) else (value,):
            switch = f"--{'' if one else 'no-'}{flag(name)[2:]}"
            flags += [switch] if isinstance(one, bool) else [flag(name), str(one)]
    with _terminable():
        result = measure(
            parse_steps(steps), command=command or None, flags=flags, tol=tol, only=only, timeout=timeout, show=show,
            keep=keep, watch=lambda name, seconds: click.echo(f"run {name}: {seconds:.1f} s", err=True),
        )  # fmt: skip
    if as_json:
        print_json(result.as_dict())
    else:
        from mlxdet.report.tables import report_console
        from mlxdet.report.twin import print_ladder

        print_ladder(result, report_console())
    return 0 if result.holds else 1


# The rungs decide how far a training goes and when it saves.
ladder.params = [p for p in ladder.params if not (p.name in ("save_every", "keep", "steps") and hasattr(p, "section"))]
