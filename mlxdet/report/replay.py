"""A step that was run again, for people: did the bits come back, then rows, tokens, layers and tensors, worst first."""

from typing import Any

from rich.console import Console

from mlxdet.measure.replay import Replay
from mlxdet.report.tables import number, plain, put, say, short, show, table


def print_replay(found: Replay, console: Console, top: int) -> None:
    """Print `found`, with at most `top` rows of a table (0: all)."""
    assert found.trace
    color = "bold green" if found.reproduced else "bold red"
    came = f"from the checkpoint of step {found.start}" if found.start else "from the beginning"
    say(console, f"{found.run}: step {found.step}, {came}")
    say(console, found.headline, color)
    if found.unlogged:
        say(console, f"not in the log, so not compared: steps {', '.join(map(str, found.unlogged))}")
    print_environment(found.environment, console)
    t = found.trace
    clipped = f", clipped by {t.clip:.3g}" if t.clip < 1 else ""
    was = f" (step {found.before.step}: {found.before.loss:.4f}, {found.before.grad_norm:.4g})" if found.before else ""
    say(console, f"loss {t.loss:.6f}, gradient norm {t.grad_norm:.4g}{was}, lr {t.lr:.3g}{clipped}")
    _print_substrates(found.substrates, console)
    print_rows(found.rows, console, top)
    _print_tokens(found.worst, console, top)
    _print_layers(found, console)
    _print_tensors(found, console, top)


def print_environment(differences: list[tuple[str, Any, Any]], console: Console) -> None:
    """Say in what the environment is not the run's."""
    if differences:
        say(console, "this is not the run's environment, so other bits would be no fault:", "yellow")
    for name, was, now in differences:
        say(console, f"  {name}: the run has {was!r}, here it is {now!r}")


def print_rows(rows: list[dict[str, Any]], console: Console, top: int) -> None:
    """Print the rows of a batch, worst first."""
    made = table("file, line, byte", "text", "row", "loss", "share", left=2)
    shown = rows[:top] if top else rows
    for r in shown:
        place = f"{plain(r['file'])}, {r['line']}, {r['offset']}"
        put(made, place, short(r["text"], 30), str(r["row"]), number(r["loss"], ".4f"), number(r["share"], ".1%"))
    show(console, made, len(rows) - len(shown))


def _print_substrates(rows: list[dict[str, Any]], console: Console) -> None:
    if not rows:
        return
    made = table("device", "kernels", "dtype", "", "loss", "gradient norm", left=4)
    for s in rows:
        put(made, s["device"], s["kernels"], s["dtype"], s["note"], number(s["loss"], ".9g"),
            number(s["grad_norm"], ".9g"))  # fmt: skip
    show(console, made)


def _print_tokens(worst: list[dict[str, Any]], console: Console, top: int) -> None:
    made = table("worst tokens, after", "target", "row", "position", "line", "loss", left=2)
    shown = worst[:top] if top else worst
    for w in shown:
        put(made, short(w["context"], 30), short(w["target"], 12), str(w["row"]), str(w["position"]), str(w["line"]),
            number(w["loss"], ".2f"))  # fmt: skip
    show(console, made)


def _print_layers(found: Replay, console: Console) -> None:
    assert found.trace
    made = table("layer", "RMS out", "max out", "gradient", "x before", "update/weight", "m", "v")
    before = {r["layer"]: r for r in found.before.layers} if found.before else {}
    for r in found.trace.layers:
        put(made, r["layer"], number(r["activation_rms"]), number(r["activation_max"]), number(r["grad_norm"]),
            _times(r, before.get(r["layer"])), number(r["update_ratio"]), number(r["m_norm"]),
            number(r["v_norm"]))  # fmt: skip
    show(console, made, spare=("v", "m", "x before", "max out"))


def _print_tensors(found: Replay, console: Console, top: int) -> None:
    assert found.trace
    made = table("tensor", "gradient", "x before", "update/weight", "m", "v")
    before = {r["name"]: r for r in found.before.tensors} if found.before else {}
    ordered = sorted(found.trace.tensors, key=lambda t: -t["grad_norm"] if t["grad_norm"] == t["grad_norm"] else -1e999)
    shown = ordered[:top] if top else ordered
    for t in shown:
        put(made, plain(t["name"]), number(t["grad_norm"]), _times(t, before.get(t["name"])), number(t["update_ratio"]),
            number(t["m_norm"]), number(t["v_norm"]))  # fmt: skip
    show(console, made, len(ordered) - len(shown), spare=("v", "m"))


def _times(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return how many times the gradient of the step before."""
    if before is None or not before["grad_norm"] or now["grad_norm"] is None:
        return "-"
    return f"{now['grad_norm'] / before['grad_norm']:.3g}"
