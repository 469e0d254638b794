"""The command line. A verb's module is imported when the verb is used, so that `mlxdet --help` loads nothing heavy.

Exit codes: 0 holds or done, 1 measured and does not hold (or training stopped on a fault), 2 wrong usage or
unreadable input, 130 interrupted and saved. Errors are one or two lines on stderr; --debug adds the traceback.
"""

import errno
import io
import os
import sys
import traceback
from importlib import import_module
from typing import NoReturn

import click

from mlxdet.errors import MlxdetError

# verb -> (module, function, what `mlxdet --help` says)
VERBS = {
    "train": ("train", "train", "Train a GPT on text: same seed, same bits."),
    "resume": ("train", "resume", "Go on with a run from its newest checkpoint, bit for bit."),
    "fork": ("train", "fork", "Go on from a checkpoint as a new run, with something changed on purpose."),
    "generate": ("generate", "generate", "Write text with a trained run."),
    "merge": ("merge", "merge", "Write a run's model as one file, LoRA's adapters merged into the base."),
    "batches": ("data", "batches", "Show what a step of a run reads, without training."),
    "tokenizer": ("data", "tokenizer", "Make a sentencepiece tokenizer, the same bytes each time."),
    "check": ("check", "check", "Compare two checkpoints of any framework: same model or not?"),
    "diverge": ("diverge", "diverge", "Find the step and stage where two runs, or two logs, part."),
    "digest": ("inspect", "digest", "Print the content digest of a checkpoint of any format."),
    "smoke": ("smoke", "smoke", "Prove on this machine that the same seed gives the same bits."),
    "twin": ("twin", "twin", "Run any command twice and compare what it wrote."),
    "ladder": ("twin", "ladder", "The distance of two runs of one command, step by step."),
    "spikes": ("spikes", "spikes", "List the steps of a run where loss or gradient norm jumped."),
    "replay": ("replay", "replay", "Run up to a step again, bit by bit, and look into that step."),
    "investigate": ("replay", "investigate", "Find out why a step spiked: data, state, both or the machine."),
    "audit": ("audit", "audit", "Name every operation that can give different bits, on any device."),
    "doctor": ("inspect", "doctor", "Say what MLX runs on here, and what would make it faster or surer."),
}
HIDDEN = {"repeat-step": ("smoke", "repeat_step")}


class _Verbs(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS and name not in HIDDEN:
            return None
        module, function = VERBS[name][:2] if name in VERBS else HIDDEN[name]
        return getattr(import_module(f"mlxdet.cli.{module}"), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, _, text) in VERBS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"mlxdet {version('mlxdet')}")
        ctx.exit()


@click.group(cls=_Verbs, epilog="`mlxdet VERB --help` explains a verb, with an example.")
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
def cli() -> None:
    """Train a small GPT on MLX so that the same seed gives the same bits, and prove it, or say where it breaks."""


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model can write any character; one that the terminal cannot show must not end a training.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Run the command line with `args` and return its exit code."""
    debug = "--debug" in args
    try:
        code = cli.main(args=args, prog_name="mlxdet", standalone_mode=False)
        if sys.stdout is not None:  # closed by who started us (>&-)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "mlxdet"
        return _complain(f"{verb}: {error.format_message()} (see `{verb} --help`)", 2, debug)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _complain("mlxdet: interrupted before there was anything to save", 130, debug)
    except MlxdetError as error:
        return _complain(f"mlxdet: {error}", error.exit_code, debug)
    except BrokenPipeError:
        _print_no_more()  # the reader of our output went away (`mlxdet ... | head`): no error of ours
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _print_no_more()
            return _complain(f"mlxdet: nothing more can be written: {error.strerror}", 2, debug)
        from mlxdet.formats import FormatError

        if isinstance(error, FormatError):
            return _complain(f"mlxdet: {error}", 2, debug)
        return _complain(
            f"mlxdet: a defect of mlxdet itself, {type(error).__name__}: {error}. --debug shows the traceback", 1, debug
        )


def _print_no_more() -> None:
    """Let what is still in the buffer go nowhere: Python would try to write it at the exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # A name in it, of a file or from one, may hold what a terminal obeys.
    click.echo("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message), err=True)
    return code
