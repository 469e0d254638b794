"""mlxdet digest, mlxdet doctor."""

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("path", metavar="PATH")
@common
def digest(path: str, as_json: bool) -> None:
    """Print the content digest of a checkpoint: of every tensor's name, dtype, shape and bytes, sorted by name.

    Two files with the same digest hold the same model to the bit, whatever their format, layout or metadata. PATH can
    be a file of any format mlxdet reads, a directory of them, or a run.

    \b
    Example:
      mlxdet digest runs/book/checkpoints/00000500/model.safetensors
    """
    from mlxdet.formats import open_checkpoint
    from mlxdet.formats.digest import content_digest

    opened = open_checkpoint(path)
    value = content_digest(opened.tensors)
    if as_json:
        size = sum(t.data.nbytes for t in opened.tensors.values())
        print_json(
            {"path": path, "format": opened.format, "digest": value, "tensors": len(opened.tensors), "bytes": size}
        )
    else:
        click.echo(f"{value}  {path}")


@click.command()
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "metal", "cuda", "cpu"]),
              help="The device to look at.")  # fmt: skip
@common
def doctor(device: str, as_json: bool) -> None:
    """Say what MLX runs on here: device, versions, BLAS, pinned settings, and what to install to be faster.

    \b
    Example:
      mlxdet doctor
    """
    from mlxdet.backends.doctor import diagnose

    found = diagnose(device)
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    from mlxdet.training.provenance import flat

    for name, value in flat({k: v for k, v in found.items() if k != "advice"}).items():
        table.add_row(name, str(value))
    console.print(table)
    for advice in found["advice"]:
        console.print(f"- {advice}", markup=False)
    if not found["advice"]:
        console.print("Nothing to advise.")
