"""The spikes of a run, or of any JSONL log with a loss: read, judged as while training, and drawn."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxdet.config import OptimConfig
from mlxdet.errors import UsageError
from mlxdet.formats import FormatError
from mlxdet.formats.source import quote
from mlxdet.measure.lines import Records
from mlxdet.report.curves import picture
from mlxdet.training.run import EVENTS, MANIFEST, METRICS, Run, timeline
from mlxdet.training.spikes import Detector

KEPT = ("rows", "batch", "lr", "detour")  # what a record says about its step, beside the numbers that are judged


def find(path: str | Path, window: int | None = None, factor: float | None = None) -> dict[str, Any]:
    """Return the spikes of the run or JSONL file at `path`, JSON-able, and the losses they are drawn on.

    `window`, `factor`: of the rule; default the run's, or those of training/spikes.py. After a rollback a step is
    judged by the steps that led to it, as while training, and not by those that were taken back.
    `spikes` is a list of {"first", "last", "steps"}: steps that jumped, each with its numbers and its rows if known;
    QUIET records without one end a spike. Numbers that are not finite are strings. Raises UsageError or
    FormatError, naming the line, on what cannot be read.
    """
    path = Path(path)
    is_run = path.is_dir()
    rule = Run(path).config.optim if is_run else OptimConfig()
    window, factor = window or rule.spike_window, factor or rule.spike_factor
    records, ignored = _run(path) if is_run else _jsonl(path)
    detector, branch = Detector(window, factor), 0
    spikes: list[dict[str, Any]] = []
    places = []
    for place, r in enumerate(records):
        if is_run and r["detour"] > branch:
            branch = r["detour"]
            finite = (s for s in records[:place] if math.isfinite(s["loss"]))  # what is not stopped the branch before
            led = [s for s in timeline(finite) if s["step"] < r["step"]]
            detector = Detector.after(led, window, factor)
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
        "run": is_run,
        "rollbacks": branch,
        "records": len(records),
        "ignored": ignored,
        "last": records[-1]["step"] if records else None,
        "window": window,
        "factor": factor,
        "spikes": spikes,
        "picture": picture([r["loss"] for r in records], places),
    }


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _run(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a run, branch by branch, each with its "detour" (0: before any rollback).

    A step that was not finite has no line in the metrics; it is the last of its branch, and comes from the events.
    """
    run = Run(path)
    known, last = {}, dict[int, int]()
    for number, r in _lines(run.path / METRICS) if (run.path / METRICS).exists() else ():
        record = _judged(run.path / METRICS, number, {"detour": 0, **r}, number)
        branch = _branch(run.path / METRICS, number, record)
        known[branch, record["step"]] = record
        last[branch] = record["step"]
    for number, e in _lines(run.path / EVENTS) if (run.path / EVENTS).exists() else ():
        if e.get("event") not in ("spike", "non-finite"):
            continue
        stop = _judged(run.path / EVENTS, number, {"detour": 0, **e}, 0)
        branch = _branch(run.path / EVENTS, number, stop)
        finite = math.isfinite(stop["loss"]) and math.isfinite(stop["grad_norm"] or 0.0)
        if not finite and stop["step"] > last.get(branch, 0):
            known[branch, stop["step"]] = stop
    return [known[key] for key in sorted(known)], 0


def _branch(path: Path, number: int, record: dict[str, Any]) -> int:
    if type(record["detour"]) is not int:
        raise UsageError(f"{path}:{number}: detour is {quote(record['detour'])}, not a whole number")
    return record["detour"]


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
    for record in Records(path):
        try:
            yield record.line, json.loads(record.raw)
        except ValueError:  # Python reads no integer of so many digits
            raise FormatError(f"{path}:{record.line}: holds a number beyond all measure") from None
