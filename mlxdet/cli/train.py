"""mlxdet train, mlxdet resume, mlxdet fork."""

from typing import Any

import click

from mlxdet.cli.options import SectionedCommand, build_config, common, config_options, given, print_json


@click.command(cls=SectionedCommand)
@click.option("--config", "file", metavar="FILE.toml", help="Read settings from a TOML file; flags win over it.")
@click.option("--out", metavar="DIR", help="Directory of the run. Default: a free name under runs/.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is in --out.")
@click.option("--print-config", is_flag=True, help="Print the resolved settings as TOML, and do nothing.")
@common
@config_options()
def train(
    file: str | None, out: str | None, overwrite: bool, print_config: bool, as_json: bool, **options: Any
) -> int | None:
    """Train a GPT on text, or tune a trained one on conversations or preferences: same seed, same bits.

    With no options it trains the preset `tiny` on an English text that comes with Python.

    \b
    Examples:
      mlxdet train --data book.txt --preset nano --steps 500 --seed 7 --out runs/book
      mlxdet train --config book.toml --seed 8 --out runs/book-8
      mlxdet train --objective sft --data chats.jsonl --from runs/book --out runs/chat
      mlxdet train --objective dpo --data pairs.jsonl --from runs/chat --lora-rank 8 --out runs/pairs
    """
    config = build_config(file, options)
    if print_config:
        from mlxdet.config import to_toml
        from mlxdet.training.base import shaped

        resolved = shaped(config).resolve()
        print_json(resolved.as_dict()) if as_json else click.echo(to_toml(resolved))
        return 0
    from mlxdet.report.progress import listener
    from mlxdet.training.loop import train as start

    return _finish(start(config, out, overwrite=overwrite, listener=listener(config, as_json)), as_json)


@click.command(cls=SectionedCommand)
@click.argument("run", metavar="RUN")
@click.option("--inexact", is_flag=True, help="Go on in a different environment; the rest may have other bits.")
@common
@config_options(comfort_only=True)
def resume(run: str, inexact: bool, as_json: bool, **options: Any) -> int | None:
    """Go on with a run from its newest checkpoint, bit for bit.

    Everything comes from the run's directory. What changes speed or comfort only can be given anew; a changed text,
    seed, batch or schedule is refused. Steps already logged beyond the checkpoint are run again and must give the
    same bits.

    \b
    Example:
      mlxdet resume runs/book
    """
    from mlxdet.report.progress import listener
    from mlxdet.training.loop import resume as go_on
    from mlxdet.training.run import Run

    watch = listener(Run(run).config, as_json)
    return _finish(go_on(run, changes=given(options), inexact=inexact, listener=watch), as_json)


@click.command(cls=SectionedCommand)
@click.argument("run", metavar="RUN")
@click.option("--at", required=True, type=click.IntRange(1), metavar="N", help="The checkpoint to go on from.")
@click.option("--out", required=True, metavar="DIR", help="Directory of the new run.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is in --out.")
@common
@config_options()
def fork(run: str, at: int, out: str, overwrite: bool, as_json: bool, **options: Any) -> int | None:
    """Continue a run from one of its checkpoints as a new run, with something changed on purpose.

    Every flag that is given replaces the old run's setting; all else stays. The new run holds the old one's log up to
    the checkpoint, and its manifest says where it comes from and what was changed. With no change it is the control.

    \b
    Example:
      mlxdet fork runs/book --at 4000 --max-lr 1e-3 --out runs/book-lr1e-3
      mlxdet diverge runs/book runs/book-lr1e-3
    """
    from mlxdet.report.progress import listener
    from mlxdet.training.fork import fork as begin
    from mlxdet.training.run import Run

    changes = given(options)
    watch = listener(Run(run).config.replace(**changes), as_json)
    return _finish(begin(run, at, out, changes, overwrite=overwrite, listener=watch), as_json)


def _finish(run: Any, as_json: bool) -> int:
    from mlxdet.report.summary import summary

    result = summary(run)
    if as_json:
        print_json(result)
    elif run.stopped == "interrupted":
        click.echo(f"Interrupted and saved at step {result['step']}. Go on with: mlxdet resume {run.path}")
    else:
        from mlxdet.training import checkpoint

        model = checkpoint.directory(run.checkpoints, result["step"]) / checkpoint.MODEL
        click.echo(f"Done: {model}\n  sha256 {result['model_sha256']}")
    return 130 if run.stopped == "interrupted" else 0
