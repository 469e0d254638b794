"""An investigation for people: the verdict first, then each experiment with its numbers."""

from typing import Any

from rich.console import Console
from rich.text import Text

from mlxdet.measure.probe import Figure
from mlxdet.measure.verdict import REPEATS, Investigation
from mlxdet.report.replay import print_environment, print_rows
from mlxdet.report.tables import number, plain, put, say, short, show, table

COLORS = {"no spike": "bold green", "unclear": "bold yellow"}


def print_investigation(found: Investigation, console: Console, top: int) -> None:
    """Print `found`, with at most `top` rows of a table (0: all)."""
    color = COLORS.get(found.verdict, "bold red")
    say(console, f"{found.run}: step {found.step}")
    label = Text("" if found.verdict == "no spike" else f"{found.verdict}: ", color)
    console.print(label + Text(found.headline), soft_wrap=True)
    for cause in found.causes:
        say(console, f"  {short(cause, 400)}")
    for row in found.rows if found.verdict in ("data", "both") else ():
        if found.together and row["row"] in found.together.rows:
            say(console, f"  row {row['row']}: {short(row['text'], 100)}", "dim")
    print_environment(found.environment, console)
    _print_replay(found, console)
    _print_places(found, console)
    _print_rows(found, console, top)
    _print_rates(found, console)
    _print_growth(found, console, top)


def _figure(f: "Figure | dict[str, Any]") -> list[str]:
    value = f if isinstance(f, dict) else vars(f)
    return [
        number(value["loss"], ".4f"),
        number(value["loss_deviations"], "+.1f"),
        number(value["grad_norm"], ".4g"),
        number(value["norm_deviations"], "+.1f"),
        value["reason"] or "no",
    ]


NUMBERS = ("loss", "deviations", "grad norm", "deviations", "high")


def _print_replay(found: Investigation, console: Console) -> None:
    made = table("the step", *NUMBERS)
    usual = [number(found.median_loss, ".4f"), "", number(found.median_norm, ".4g"), "", ""]
    put(made, "median before", *usual)
    put(made, "logged", *_figure(found.logged))
    if found.replayed:
        same = "to the bit" if not found.first_difference else "not to the bit"
        put(made, f"replayed, {same}", *_figure(found.replayed))
    for s in found.substrates[1:]:
        put(made, f"{s['kernels']}, {s['dtype']}, {s['device']}", *_figure(s))
    show(console, made)
    say(console, f"repeated {REPEATS} times here: {found.repeats_identical} identical", "dim")


def _print_places(found: Investigation, console: Console) -> None:
    if not found.places:
        return
    made = table("in the state", "batch", *NUMBERS, left=2)
    for p in found.places:
        put(made, p.name, "others", *_figure(p.typical))
        put(made, "", "its own", *_figure(p.batch))
    show(console, made)
    console.print(
        Text(f"others: the median of {found.places[0].others}, judged by the log; its own: judged by the others", "dim")
    )


def _print_rows(found: Investigation, console: Console, top: int) -> None:
    if found.without:
        made = table("without rows", *NUMBERS)
        shown = found.without[: top or None]
        if found.together and len(found.together.rows) > 1:
            put(made, ", ".join(map(str, found.together.rows)), *_figure(found.together.figure))
        for w in shown:
            rows = str(w.rows[0]) if len(w.rows) == 1 else f"{w.rows[0]} to {w.rows[-1]}"
            put(made, rows, *_figure(w.figure))
        show(console, made)
    if found.rows:
        print_rows(found.rows, console, top)


def _print_rates(found: Investigation, console: Console) -> None:
    if found.learning_rates:
        made = table("learning rate", *NUMBERS)
        for r in found.learning_rates:
            put(made, f"x {r['share']:g} from step {r['from'] + 1} on", *_figure(r))
        show(console, made)


def _print_growth(found: Investigation, console: Console, top: int) -> None:
    """Print what grew since the earlier state, where the spike is one of the state."""
    if found.verdict not in ("state", "both"):
        return
    made = table("layer", "RMS out before", "now", "gradient before", "now", "weights before", "now")
    for layer in found.layers:
        pairs = (layer["activation_rms"], layer["grad_norm"], layer["weight_norm"])
        put(made, layer["layer"], *(number(x) for pair in pairs for x in pair))
    show(console, made)
    made = table("largest weight", "before", "now")
    for t in found.tensors[: top or None]:
        put(made, plain(t["name"]), *(number(x) for x in t["weight_max"]))
    show(console, made)
