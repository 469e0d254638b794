"""The spikes of a run, or of any JSONL log with a loss: read, judged as while training, and drawn."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.formats.source import quote
from mlxdet.report.summary import sparkline
from mlxdet.training.run import EVENTS, MANIFEST, METRICS, Run
from mlxdet.training.spikes import Detector

KEPT = ("rows", "batch", "lr")  # what a record says about its step, beside the numbers that are judged


def find(path: str | Path, window: int, factor: float) -> dict[str, Any]:
    """Return the spikes of the run or JSONL file at `path`, JSON-able, and the losses they are drawn on.

    `spikes` is a list of {"first", "last", "steps"}: steps that jumped, each with its numbers and its rows if known;
    QUIET records without one end a spike. Numbers that are not finite are strings. Raises UsageError, naming the line,
    on what cannot be read.
    """
    path = Path(path)
    records, ignored = _run(path) if path.is_dir() else _jsonl(path)
    detector = Detector(window, factor)
    spikes: list[dict[str, Any]] = []
    places = []
    for place, r in enumerate(records):
        spike = detector.see(r["step"], r["loss"], r["grad_norm"])
        if spike is None:
            continue
        places.append(place)
        if spike.onset:
            spikes.append({"first": spike.step, "last": spike.step, "steps": []})
        found = asdict(spike) | {k: r[k] for k in KEPT if k in r}
        spikes[-1]["steps"].append({k: _spelled(v) for k, v in found.items() if k != "onset"})
        spikes[-1]["last"] = spike.step
    return {
        "source": str(path),
        "run": path.is_dir(),
        "records": len(records),
        "ignored": ignored,
        "last": records[-1]["step"] if records else None,
        "window": window,
        "factor": factor,
        "spikes": spikes,
        "picture": picture([r["loss"] for r in records], places),
    }


def picture(losses: list[float], places: list[int], width: int = 60) -> list[str]:
    """Return two lines: the loss as bars, and a ^ below each bar that holds a spike, places being indices of losses.

    A bar is the mean of its records, or where a spike is, the full height.
    """
    marked = set(places)
    calm = [v for i, v in enumerate(losses) if i not in marked and math.isfinite(v)]
    if not calm:
        return ["", ""]
    count = min(width, len(losses))
    top, bars, marks, last = max(calm), [], "", calm[0]
    for i in range(count):
        inside = range(round(i * len(losses) / count), round((i + 1) * len(losses) / count))
        spiked = any(j in marked for j in inside)
        last = top if spiked else sum(losses[j] for j in inside) / len(inside)
        bars.append(last)
        marks += "^" if spiked else " "
    return [sparkline(bars, width), marks.rstrip()]


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _run(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a run, the step that stopped it for not being finite as the last one."""
    run = Run(path)
    records = list(_lines(run.path / METRICS)) if (run.path / METRICS).exists() else []
    known = [_judged(run.path / METRICS, number, r, number) for number, r in records]
    if (run.path / EVENTS).exists():
        last = known[-1]["step"] if known else 0
        stops = {
            e["step"]: {**e, "loss": float(e["loss"]), "grad_norm": float(e["grad_norm"])}
            for _, e in _lines(run.path / EVENTS)
            if e.get("event") == "non-finite" and e["step"] > last
        }
        known += [stops[step] for step in sorted(stops)]
    return known, 0


def _jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a log that have a loss, and how many have none."""
    lines = list(_lines(path))
    records = [_judged(path, number, r, i) for i, (number, r) in enumerate(lines, 1) if "loss" in r]
    if not records:
        raise UsageError(f'{path}: no line has a "loss"; give a run (a directory with {MANIFEST}), or JSON lines')
    return records, len(lines) - len(records)


def _judged(path: Path, number: int, record: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a record with step, loss and gradient norm as numbers. A record without a step counts by its place."""
    step = record.get("step", place)
    if not isinstance(step, int) or isinstance(step, bool):
        raise UsageError(f"{path}:{number}: step is {quote(step)}, not a whole number")
    values = {"loss": record.get("loss"), "grad_norm": record.get("grad_norm")}
    for name, value in values.items():
        if value is None and name == "grad_norm":
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            values[name] = float(value)  # "nan", "inf": how some writers spell what JSON has no word for
        except (ValueError, OverflowError):
            raise UsageError(f"{path}:{number}: {name} is {quote(value)}, not a number") from None
    return {**record, "step": step, **values}


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSONL file. A last line without its end is still being written: left out."""
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError
        except (ValueError, RecursionError):
            if number == len(texts):
                return
            raise UsageError(f"{path}:{number}: not a JSON object") from None
        yield number, record
