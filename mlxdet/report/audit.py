"""An audit as a table, with the way out of each finding below it."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdet.auditing.report import Audit
from mlxdet.formats.source import escape


def show(what: str, results: Mapping[str, Audit], console: Console | None = None) -> None:
    """Print the audits of `what` by target."""
    console = console or Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, title=Text(f"audit of {what}"), title_justify="left", title_style="")
    for name in ("target", "operations", "can race", "not audited"):
        table.add_column(name, justify="left" if name == "target" else "right")
    for target, audit in results.items():
        counts = [str(sum(f.count for f in audit.findings)), str(len(audit.not_audited))]
        table.add_row(target, str(audit.primitives), *counts)
    console.print(table)
    for audit in results.values():
        for finding in audit.findings:
            console.print(Text("\n" + _printable(str(finding))))
        for unknown in audit.not_audited:
            console.print(Text(f"\n{audit.target}: " + _printable(str(unknown))))
    for note in dict.fromkeys(n for audit in results.values() for n in audit.notes):
        console.print(Text("note: " + _printable(note)))
    if all(audit.ok for audit in results.values()):
        console.print(Text(f"Nothing can race on {', '.join(results)}."))


def _printable(text: str) -> str:
    return "\n".join(map(escape, text.split("\n")))
