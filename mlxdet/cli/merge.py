"""mlxdet merge."""

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--out", required=True, metavar="FILE.safetensors", help="Where the model is written.")
@click.option("--step", type=click.IntRange(1), metavar="N", help="Checkpoint to use. Default: the newest.")
@click.option("--overwrite", is_flag=True, help="Replace the file that is at --out.")
@common
def merge(run: str, out: str, step: int | None, overwrite: bool, as_json: bool) -> None:
    """Write the model of a LoRA run as one file: each weight plus the product of its adapters.

    The names are those of a model without adapters, so `check`, `digest` and other programs read it like a checkpoint.
    Computed in float64 and rounded once; the same bytes on every machine.

    \b
    Example:
      mlxdet merge runs/pairs --out pairs.safetensors
    """
    from mlxdet.training.merge import merge as write

    done = write(run, out, step, overwrite=overwrite)
    if as_json:
        print_json(done)
        return
    click.echo(f"{out}: step {done['step']} of {run}, {done['tensors']} tensors, adapters merged")
    click.echo(f"  sha256 {done['sha256']}\n  digest {done['digest']}")
