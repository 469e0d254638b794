"""What an investigation found, and what follows from it: the verdict, the rows, the likely cause."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxdet.measure.history import spelled

if TYPE_CHECKING:
    from mlxdet.measure.probe import Figure, Place, Without

REPORT_FORMAT, REPORT_VERSION = "mlxdet investigation", 1
REPEATS = 5  # times the step itself is repeated


@dataclass
class Investigation:
    """What was measured, and the verdict: "no spike", "data", "state", "both", "machine" or "unclear"."""

    run: str
    step: int
    logged: "Figure"
    median_loss: float | None
    median_norm: float | None
    environment: list[tuple[str, Any, Any]]
    verdict: str = ""
    headline: str = ""
    causes: list[str] = field(default_factory=list)
    start: int = 0
    replayed: "Figure | None" = None
    first_difference: tuple[int, str, Any, Any] | None = None
    repeats_identical: int = 0  # of REPEATS
    places: "list[Place]" = field(default_factory=list)
    without: "list[Without]" = field(default_factory=list)
    together: "Without | None" = None  # the fewest rows found whose absence ends the spike
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the batch, worst first
    learning_rates: list[dict[str, Any]] = field(default_factory=list)
    substrates: list[dict[str, Any]] = field(default_factory=list)
    lineage: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able; numbers that are not finite are strings."""
        plain = {
            k: v for k, v in vars(self).items() if k not in ("places", "without", "together", "logged", "replayed")
        }
        return spelled(
            {
                "format": REPORT_FORMAT,
                "version": REPORT_VERSION,
                **plain,
                "logged": asdict(self.logged),
                "replayed": asdict(self.replayed) if self.replayed else None,
                "places": [p.as_dict() for p in self.places],
                "without": [asdict(w) for w in self.without],
                "together": asdict(self.together) if self.together else None,
            }
        )


def conclude(found: Investigation) -> None:
    """Set verdict, headline and causes of a spike that came again, from what was measured."""
    # Where no batch at all is finite, it says nothing that this one is not.
    here, elsewhere = found.places[0], [p for p in found.places[1:] if p.typical.reason != "not finite"]
    state, batch = here.typical.reason is not None, here.batch.reason is not None
    everywhere = bool(elsewhere) and all(p.batch.reason is not None for p in elsewhere)
    if state and not (batch and everywhere):
        found.verdict = "state"
        found.headline = f"other batches are high in this state too; their median: {against(here.typical)}"
    elif batch and everywhere and not state:
        names = " and ".join(p.name for p in elsewhere)
        found.verdict = "data"
        found.headline = f"these rows are high in other states too ({names}), other batches are not in this one"
    elif batch and not elsewhere:
        found.verdict = "unclear"
        found.headline = "these rows are high, other batches are not; there is no other state to try them in"
    elif batch and state:
        found.verdict = "both"
        found.headline = "each alone: other batches are high in this state, these rows in other states"
    elif batch:
        names = " and ".join(p.name for p in elsewhere if p.batch.reason is None)
        found.verdict = "both"
        found.headline = f"only together: other batches are not high in this state, these rows not in {names}"
    else:
        found.verdict = "unclear"
        found.headline = (
            f"neither stands out: in this state {here.as_bad} of {here.others} other batches are as high, and their "
            f"median is not; perhaps an unlucky draw"
        )
    found.headline += unlike(found)
    if found.verdict in ("data", "both"):
        _name_rows(found)
    if not _name_break(found) and found.verdict in ("state", "both") and found.learning_rates:
        last = found.learning_rates[-1]
        if last["reason"] is None:
            found.causes.append(
                f"the learning rate is too high: with {last['share']:g} of it from step {last['from'] + 1} on there is "
                f"no spike (loss {last['loss']:.4f})"
            )
    for s in found.substrates[1:]:
        if s["reason"] is None:
            found.causes.append(
                f"the arithmetic: there is no spike with {s['kernels']} kernels in {s['dtype']} on {s['device']}"
            )


def _name_break(found: Investigation) -> bool:
    """Say where the checkpoint is not what the steps before it lead to. On another machine that is no news."""
    if not found.lineage or not found.lineage["moved"] or found.environment:
        return False
    moved = found.lineage["moved"]
    m = moved[0]
    text = (
        f"the checkpoint of step {found.start} is not what the steps before it lead to: {len(moved)} of its tensors "
        f"differ, {m['name']}{m['index']} is {m['saved']:g} instead of {m['reached']:g}"
    )
    if found.lineage["first_difference"]:
        step, name, logged, now = found.lineage["first_difference"]
        text += f"; step {step} does not reproduce ({name} was logged as {logged!r}, replayed as {now!r})"
    found.causes.append(text)
    return True


def _name_rows(found: Investigation) -> None:
    by_number = {r["row"]: r for r in found.rows}
    rows = found.together.rows if found.together else (0,) if len(found.rows) == 1 else ()
    for number in rows:
        r = by_number[number]
        found.causes.append(f"row {number}: {r['file']}, line {r['line']}, byte {r['offset']} (token {r['token']})")
    if not rows:
        found.causes.append("it is the batch as a whole: without half of its rows there still is a spike")


def against(figure: "Figure") -> str:
    if figure.loss_deviations is None or figure.norm_deviations is None:
        return f"loss {figure.loss}, gradient norm {figure.grad_norm}"
    return (
        f"loss {figure.loss:.4f} is {figure.loss_deviations:+.1f} and gradient norm {figure.grad_norm:.4g} "
        f"{figure.norm_deviations:+.1f} deviations from the median"
    )


def unlike(found: Investigation) -> str:
    if found.first_difference is None:
        return ""
    step, name, logged, now = found.first_difference
    return f", but step {step} does not reproduce: {name} was logged as {logged!r}, replayed as {now!r}"
