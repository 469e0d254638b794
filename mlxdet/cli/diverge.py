"""mlxdet diverge."""

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--key", metavar="NAMES", multiple=True,
              help="JSONL: fields that identify a record and rise from record to record. Default: step.")  # fmt: skip
@click.option("--by-position", is_flag=True, help="JSONL: match records by their position instead.")
@click.option("--fields", metavar="NAMES", multiple=True,
              help="JSONL: compare only these, earliest stage first. Default: all that both files have.")  # fmt: skip
@click.option("--ignore", metavar="NAMES", multiple=True,
              help="JSONL: leave these out (times, hosts). Nothing is left out unasked.")  # fmt: skip
@click.option("--top", default=12, show_default=True, type=click.IntRange(0), metavar="N",
              help="Show this many rows of a table; 0 shows all.")  # fmt: skip
@common
def diverge(
    a: str, b: str, key: tuple[str, ...], by_position: bool, fields: tuple[str, ...], ignore: tuple[str, ...], top: int,
    as_json: bool,
) -> int:  # fmt: skip
    """Find where two runs part: the first step, the first stage in it, the size from there on, and the cause.

    A and B are runs of mlxdet, or any two JSONL files. NAMES are separated by commas; the option can be repeated. Exit
    0: identical in every bit that both hold. Exit 1: they differ, also in length. Exit 2: nothing to compare.

    \b
    Examples:
      mlxdet diverge runs/a runs/b
      mlxdet diverge a.jsonl b.jsonl --key step --fields loss,grad_norm
      mlxdet diverge a.jsonl b.jsonl --key epoch,batch --ignore time
    """
    from mlxdet.measure.divergence import diverge as measure

    found = measure(a, b, _names(key), _names(fields), _names(ignore), by_position)
    if as_json:
        print_json(found.as_dict())
    else:
        from mlxdet.report.divergence import print_divergence
        from mlxdet.report.tables import report_console

        print_divergence(found, report_console(), top)
    return 0 if found.identical else 1


def _names(given: tuple[str, ...]) -> list[str]:
    return [name for text in given for name in text.split(",")]
