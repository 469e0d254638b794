"""mlxdet check."""

import sys

import click

from mlxdet.cli.options import Finite, common, print_json
from mlxdet.measure.compare import DIFFERENT, SAME, compare

HOLDS = {"identical": ("identical",), "same": ("identical", "same"), "different": ("different",)}


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--expect", type=click.Choice(list(HOLDS)),
              help="Exit 1 unless this is the verdict; identical is also the same.")  # fmt: skip
@click.option("--same", default=SAME, show_default=True, type=Finite(0), metavar="X",
              help="Largest relFro of what counts as the same model.")  # fmt: skip
@click.option("--different", default=DIFFERENT, show_default=True, type=Finite(0), metavar="X",
              help="Least relFro of what counts as different models.")  # fmt: skip
@click.option("--per-tensor", is_flag=True, help="Judge by the worst tensor, not by all together.")
@click.option("--group", metavar="REGEX",
              help="Group tensors by the first group, or the whole, of this match. Default: by module.")  # fmt: skip
@click.option("--only", metavar="REGEX", help="Compare only tensors whose name this matches somewhere.")
@click.option("--strip", multiple=True, metavar="PREFIX", help="Drop this prefix from names; repeatable.")
@click.option("--rename", multiple=True, metavar="OLD=NEW",
              help="Take a name, or a module and all below it, for another; repeatable.")  # fmt: skip
@click.option("--top", default=20, show_default=True, type=click.IntRange(0), metavar="N",
              help="Show this many tensors and groups, worst first; 0 shows all.")  # fmt: skip
@common
def check(
    a: str, b: str, expect: str | None, same: float, different: float, per_tensor: bool, group: str | None,
    only: str | None, strip: tuple[str, ...], rename: tuple[str, ...], top: int, as_json: bool,
) -> int:  # fmt: skip
    """Compare two checkpoints of any framework: identical, the same, different, or unclear.

    A (the reference) and B are files of any format mlxdet reads, directories of them, or runs. Distances are in
    float64; relFro is |A - B| / |A|. What is not a tensor (names of files, times, ids, metadata) is reported and never
    decides.

    \b
    Examples:
      mlxdet check runs/a runs/b --expect identical
      mlxdet check model.safetensors pytorch_model.bin --strip model. --rename head=lm_head
      mlxdet check a.npz b.npz --group 'layers\\.(\\d+)'
    """
    live = sys.stderr.isatty() and not as_json

    def progress(done: int, of: int) -> None:
        if live:
            click.echo(f"\r{done} of {of} tensors", nl=False, err=True)

    try:
        found = compare(a, b, same=same, different=different, group=group, strip=strip,
                        rename=[_pair(text) for text in rename], only=only, per_tensor=per_tensor,
                        progress=progress)  # fmt: skip
    finally:
        if live:
            click.echo("\r\x1b[K", nl=False, err=True)
    holds = expect is None or found.verdict in HOLDS[expect]
    if as_json:
        print_json(found.as_dict() | {"expected": expect, "holds": holds})
    else:
        from mlxdet.report.comparison import print_comparison
        from mlxdet.report.tables import report_console

        console = report_console()
        print_comparison(found, console, top)
        if not holds:
            console.print(f"expected {expect}: does not hold", style="bold red")
    return 0 if holds else 1


def _pair(text: str) -> tuple[str, str]:
    from mlxdet.errors import UsageError

    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise UsageError(f"--rename {text!r}: write OLD=NEW")
    return old, new
