"""Command-line options: those of every verb, and those made from the fields of the config."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlxdet.config import FIELDS, SEEDS, SPIKES, Field, TrainConfig, flag, from_toml

SECTIONS = {
    "data": "Text and order",
    "tune": "What is learned, and from where on",
    "model": "Model",
    "optim": "Steps and optimizer",
    "seeds": "Seeds",
    "loop": "Device, and what happens beside the steps",
}


class SectionOption(click.Option):
    """An option shown under the heading of its section."""

    def __init__(self, *args: Any, section: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows options section by section, its own first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SECTIONS.values())}
        for param in self.get_params(ctx):
            shown = param.get_help_record(ctx) if isinstance(param, click.Option) else None  # usage shows arguments
            if shown is not None:
                title = SECTIONS[param.section] if isinstance(param, SectionOption) else "Options"
                groups[title].append(shown)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every verb has: --json and --debug."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")(
        command
    )


class Finite(click.FloatRange):
    """A number in a range; "nan" and "inf" are none, as no comparison with them means anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


def as_text(value: Any) -> str:
    """Return `value` as JSON, which has no NaN and no infinity: they become strings."""
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(value), indent=1, allow_nan=False)


def print_json(value: Any) -> None:
    """Print `value` as the one object of --json."""
    click.echo(as_text(value))


def check_new(option: str, file: str | None) -> None:
    """Refuse, before anything is computed, a file that is there or has no directory to lie in."""
    from mlxdet.errors import UsageError

    if file is None:
        return
    path = Path(file)
    if path.exists() or path.is_symlink():
        raise UsageError(f"{option}: {file} is already there; name a new file")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: {path.parent} is not a directory")


def write_new(option: str, file: str | None, value: Any) -> None:
    """Write what --json prints to a new file, if one was named."""
    from mlxdet.errors import Fault

    if file is not None:
        try:
            with open(file, "x", encoding="utf-8") as out:
                out.write(as_text(value) + "\n")
        except OSError as error:
            raise Fault(f"{option}: {file} cannot be written ({error.strerror})") from None


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelled(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _kind(f: Field) -> Any:
    if f.name in SEEDS:
        return click.STRING  # parse_seed has the range and the message
    if f.choices:
        return click.Choice(f.choices)
    return {int: click.INT, float: click.FLOAT, str: click.STRING, tuple: click.STRING, bool: click.BOOL}[f.kind]


def config_options(comfort_only: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for every field of the config; with `comfort_only` the others are accepted but not shown."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for f in reversed(FIELDS.values()):
            default = (
                "" if f.default in (None, (), "") or f.optional else f"  [default: {f.default!r}]".replace("'", "")
            )
            metavar = {int: "N", float: "X", str: "TEXT", tuple: "PATH", bool: ""}[f.kind]
            names = f"{flag(f.name)}/--no-{flag(f.name)[2:]}" if f.kind is bool else flag(f.name)
            hidden = comfort_only and not f.comfort and f.name not in SPIKES
            command = click.option(
                names, f.name, cls=SectionOption, section=f.section, type=_kind(f), default=None,
                multiple=f.kind is tuple, help=f.help + default, hidden=hidden,
                metavar=None if f.choices or f.kind is bool else metavar,
            )(command)  # fmt: skip
            if f.name == "prefetch":
                command = click.option(
                    "--no-prefetch",
                    is_flag=True,
                    cls=SectionOption,
                    section=f.section,
                    help="The same as --prefetch 0.",
                )(command)
        return command

    return add


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that were given on the command line. Raises UsageError on a contradiction."""
    from mlxdet.errors import UsageError

    values = {k: v for k, v in options.items() if k in FIELDS and v is not None and v != ()}
    if options.get("no_prefetch"):
        if values.get("prefetch"):
            raise UsageError("--no-prefetch contradicts --prefetch; give one of them")
        values["prefetch"] = 0
    return values


def build_config(file: str | None, options: dict[str, Any]) -> TrainConfig:
    """Return the config of a command line: flags over the file over the defaults."""
    base = from_toml(file) if file is not None else TrainConfig()
    return base.replace(**given(options))
