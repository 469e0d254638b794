"""mlxdet replay, mlxdet investigate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mlxdet.cli.options import Finite, check_new, common, print_json, write_new

DETOUR = click.option(
    "--detour", type=click.IntRange(0), metavar="D",
    help="The run as it was after its D-th rollback (0: before the first). Default: as it is now.",
)  # fmt: skip
DATA = click.option("--data", multiple=True, metavar="PATH", help="Where the run's text lies now, if it was moved.")
TOKENIZER = click.option("--tokenizer", metavar="FILE", help="Where its tokenizer lies now, if it was moved.")
TOP = click.option("--top", default=8, show_default=True, type=click.IntRange(0), metavar="N",
                   help="Show this many rows of a table; 0 shows all.")  # fmt: skip
STEP = click.option("--step", required=True, type=click.IntRange(1), metavar="N", help="The step, from 1.")


@click.command()
@click.argument("path", metavar="RUN")
@STEP
@click.option("--from", "start", type=click.IntRange(0), metavar="K",
              help="Start after step K, which has a checkpoint or is 0. Default: the nearest before N.")  # fmt: skip
@click.option("--device", type=click.Choice(["metal", "cuda", "cpu"]), help="Run step N on this device too.")
@click.option("--kernels", type=click.Choice(["deterministic", "default"]), help="Run step N with these kernels too.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Run step N in this type too.")
@DETOUR
@DATA
@TOKENIZER
@click.option("--trace", metavar="FILE", help="Write what --json prints to FILE, which must not exist.")
@TOP
@common
def replay(
    path: str, step: int, start: int | None, device: str | None, kernels: str | None, dtype: str | None,
    detour: int | None, data: tuple[str, ...], tokenizer: str | None, trace: str | None, top: int, as_json: bool,
) -> int:  # fmt: skip
    """Run a run again up to step N: is every logged bit the same? Then look into step N.

    Goes from the nearest checkpoint before N and compares loss, gradient norm, learning rate, rows and batch of every
    step with the log. At N: the rows with their text, the worst tokens, and per layer and tensor the norms of
    activations, gradients, updates and moments. --device, --kernels and --dtype run step N from the same state once
    more for each of them, and once with all. Writes nothing into the run, and can look at one that is being trained.

    Exit code 0: all logged steps came out the same. 1: one did not.

    \b
    Examples:
      mlxdet replay runs/book --step 4218
      mlxdet replay runs/book --step 4218 --dtype float32 --trace step-4218.json
    """
    from mlxdet.measure.replay import replay as measure

    run = _opened(path, data, tokenizer)
    _check_free(trace, run.path, "--trace")
    with _progress(as_json) as say:
        found = measure(run, step, start=start, branch=detour, substrates=_substrates(run, device, kernels, dtype),
                        watcher=lambda s, last: say(f"step {s} of {last}"))  # fmt: skip
    write_new("--trace", trace, found.as_dict())
    if as_json:
        print_json(found.as_dict())
    else:
        from mlxdet.report.replay import print_replay

        print_replay(found, _console(), top)
    return 0 if found.reproduced else 1


@click.command()
@click.argument("path", metavar="RUN")
@STEP
@click.option("--controls", type=click.IntRange(20), default=24, show_default=True, metavar="N",
              help="Other batches to compare with.")  # fmt: skip
@click.option("--sibling-steps", "sibling", type=click.IntRange(0), default=200, show_default=True, metavar="N",
              help="Train a model of another init seed for so many steps at most; 0: none.")  # fmt: skip
@click.option("--spike-window", "window", type=click.IntRange(20), metavar="N",
              help="Steps looked back on. Default: the run's.")  # fmt: skip
@click.option("--spike-factor", "factor", type=Finite(1.0, 1e6), metavar="X",
              help="Robust deviations above the median that make a spike. Default: the run's.")  # fmt: skip
@DETOUR
@DATA
@TOKENIZER
@click.option("--report", metavar="FILE", help="Write what --json prints to FILE, which must not exist.")
@TOP
@common
def investigate(
    path: str, step: int, controls: int, sibling: int, window: int | None, factor: float | None, detour: int | None,
    data: tuple[str, ...], tokenizer: str | None, report: str | None, top: int, as_json: bool,
) -> int:  # fmt: skip
    """Find out why step N spiked: the data, the state, both, or the machine.

    Replays the step to the bit; runs other batches in its state, and its batch in other states; leaves out its rows one
    by one; trains the steps before it at lower learning rates; computes it with other kernels. Writes nothing into
    the run, and can look at one that is being trained.

    \b
    no spike   the step is no spike by the rule of `mlxdet spikes`
    data       its rows are high in any state; the rows are named
    state      any rows are high in its state
    both       only together, or each alone
    machine    it does not come again: the log holds what this run does not compute
    unclear    it comes again, but neither rows nor state stand out
    Exit code 0: no spike, 1: a spike, whatever its cause.

    \b
    Example:
      mlxdet investigate runs/book --step 4218
    """
    from mlxdet.measure.investigate import investigate as measure

    run = _opened(path, data, tokenizer)
    _check_free(report, run.path, "--report")
    with _progress(as_json) as say:
        found = measure(run, step, branch=detour, controls=controls, sibling=sibling, window=window, factor=factor,
                        watcher=say)  # fmt: skip
    write_new("--report", report, found.as_dict())
    if as_json:
        print_json(found.as_dict())
    else:
        from mlxdet.report.investigate import print_investigation

        print_investigation(found, _console(), top)
    return 0 if found.verdict == "no spike" else 1


def _opened(path: str, data: tuple[str, ...], tokenizer: str | None) -> Any:
    """Return the run; its text and tokenizer are looked for where they lie now, and must still be the same."""
    from mlxdet.training.run import Run

    run = Run(path)
    moved = {k: v for k, v in (("data", data), ("tokenizer", tokenizer)) if v}
    run.config = run.config.replace(**moved)
    return run


def _substrates(run: Any, device: str | None, kernels: str | None, dtype: str | None) -> list[Any]:
    """Return what differs from the run's own substrate: one for each option, and one with all of them."""
    from dataclasses import replace

    from mlxdet.measure.substrate import Substrate

    own = Substrate.of(run.config)
    asked = {k: v for k, v in (("device", device), ("kernels", kernels), ("dtype", dtype)) if v is not None}
    each = [replace(own, **{k: v}) for k, v in asked.items()]
    return list(dict.fromkeys([*each, *([replace(own, **asked)] if asked else [])]))


def _check_free(file: str | None, run: Path, option: str) -> None:
    """Refuse, before anything is computed, a file that is there or lies in the run."""
    from mlxdet.errors import UsageError

    check_new(option, file)
    if file is not None and run.resolve() in Path(file).resolve().parents:
        raise UsageError(f"{option}: {file} lies in the run, which is only read; choose a place beside it")


def _console() -> Any:
    from mlxdet.report.tables import report_console

    return report_console()


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows one line about the work going on, on a terminal."""
    shown = sys.stderr.isatty() and not quiet
    try:
        yield (lambda text: click.echo(f"\r\033[K{text}", err=True, nl=False)) if shown else (lambda text: None)
    finally:
        if shown:
            click.echo("\r\033[K", err=True, nl=False)
