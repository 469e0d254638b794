"""Where two runs part: the first step and, in it, the first stage that differs, the size from there on, and the cause.

A step computes, in this order, rows, batch, loss (forward), gradient norm (backward), learning rate (schedule) and
weights (update); the log holds all but the last. Weights and moments are seen at the checkpoints that both runs hold,
and by their losses at the validations. So what the log shows first need not be where it began: `First.certain` says
whether something unseen can have come before it, and `First.reading` what.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.formats import FormatError
from mlxdet.formats.source import bare, quote
from mlxdet.measure.causes import Cause, causes
from mlxdet.measure.checkpoints import LABELS, CheckpointPair, pair, read_logged, read_moved, seen_before, spell
from mlxdet.measure.lines import Number, Records
from mlxdet.measure.parting import First, extent, first_logged, length, number, opening, remarks, require_something
from mlxdet.measure.records import RecordComparison, compare_records
from mlxdet.training import checkpoint
from mlxdet.training.run import EVENTS, MANIFEST, METRICS, VALIDATION

# Fields of metrics.jsonl -> the stage they belong to, in the order of the computation. Any others come after these.
STAGE_OF = {"rows": "rows", "batch": "batch", "tokens": "batch", "scored": "batch", "loss": "loss", "loss_hex": "loss",
            "reward_chosen": "loss", "reward_rejected": "loss", "margin": "loss", "accuracy": "loss",
            "grad_norm": "grad_norm", "lr": "lr", "skipped": "skipped"}  # fmt: skip
# What the records of a run leave out where it is this: a rollback numbers the steps that it takes anew, a detour.
ABSENT = {"detour": Number("0"), "skipped": False}
ROUTINE = {"start", "save", "sample", "stop"}  # events that say nothing about bits
KINDS = ("seed", "config", "corpus", "tokenizer", "environment", "code", "resume", "manifest")


@dataclass(frozen=True)
class Divergence:
    """What `diverge` found. `verdict` is "identical" (every bit that both sides hold) or "differs".

    `kind` is "runs" or "records"; what follows `notes` is of runs only. `only_a` and `only_b` are the steps that only
    one of them has a checkpoint of.
    """

    kind: str
    a: str
    b: str
    headline: str
    first: First | None
    log: RecordComparison
    notes: list[str]
    checkpoints: list[CheckpointPair] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    validation: RecordComparison | None = None
    causes: list[Cause] = field(default_factory=list)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "differs" if self.first else "identical"

    @property
    def identical(self) -> bool:
        return self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        stage, common = self.first.stage if self.first else None, self.log.common
        told: dict[str, Any] = {
            "kind": self.kind, "a": self.a, "b": self.b, "verdict": self.verdict, "headline": self.headline,
            "first": asdict(self.first) if self.first else None, "notes": self.notes,
            "compared": {"records": common, "key": list(self.log.key or ()), "fields": list(self.log.fields)},
            "logs": {"a": self.log.a.as_dict(), "b": self.log.b.as_dict()},
            "fields": {name: f.as_dict() for name, f in self.log.fields.items()},
        }  # fmt: skip
        if self.kind == "records":
            return told
        validation = self.validation
        return told | {
            "checkpoints": [c.as_dict() for c in self.checkpoints],
            "checkpoints_only_in": {"a": self.only_a, "b": self.only_b},
            "validation": {
                "records": validation.common if validation else 0,
                "fields": {n: f.as_dict() for n, f in validation.fields.items()} if validation else {},
            },
            "causes": [c.as_dict(stage) for c in self.causes if c.decides],
            "cannot_change_bits": [c.as_dict(stage) for c in self.causes if not c.decides],
            "events": self.events,
        }


def diverge(
    a: str | Path, b: str | Path, key: Sequence[str] = (), fields: Sequence[str] = (),
    ignore: Sequence[str] = (), by_position: bool = False,
) -> Divergence:  # fmt: skip
    """Compare two runs of mlxdet, or two JSONL files (the other arguments are for these; see `compare_records`).

    Raises UsageError for what is neither and where there is nothing that both hold, FormatError for what is damaged.
    """
    one, two = Path(a), Path(b)
    for path in (one, two):
        if not path.exists():
            raise UsageError(f"{path}: there is no such run or file")
    if one.is_dir() != two.is_dir():
        raise UsageError(f"{one} and {two}: a directory and a file; give two runs, or two JSONL files")
    if not one.is_dir():
        return _files(one, two, key, fields, ignore, by_position)
    if key or fields or ignore or by_position:
        raise UsageError("--key, --fields, --ignore and --by-position are for JSONL files; what a run logs is known")
    return _runs(one, two)


def _files(
    a: Path, b: Path, key: Sequence[str], fields: Sequence[str], ignore: Sequence[str], by_position: bool
) -> Divergence:
    if key and by_position:
        raise UsageError("--key contradicts --by-position; give one of them")
    if twice := {*fields} & {*ignore, *(key or ())}:
        raise UsageError(f"--fields: {quote(min(twice))} is also in --key or --ignore")
    if "" in {*fields, *ignore, *(key or ())}:
        raise UsageError("--key, --fields, --ignore: a name is empty; write NAME,NAME without spaces")
    log = compare_records(a, b, key or None, fields, ignore, by_position)
    require_something(log)
    for name in fields:
        if name not in log.fields:
            lacking = " and ".join(
                str(s.source.path) for s, o in ((log.a, log.b), (log.b, log.a)) if name not in s.fields
            )
            raise UsageError(f"--fields: no common record of {lacking} has {quote(name)}")
    first = first_logged(log, {name: name for name in log.fields}, {}) or length(log)
    headline = opening(first) if first else f"identical: {extent(log)}"
    return Divergence("records", str(a), str(b), headline, first, log, [*remarks(log), *_lengths(log, first)])


def _runs(a: Path, b: Path) -> Divergence:
    manifests = [_manifest(path) for path in (a, b)]
    for path in (a, b):
        if not (path / METRICS).exists():
            raise UsageError(f"{path}: nothing to compare: no step was logged (it has no {METRICS})")
    log = compare_records(a / METRICS, b / METRICS, ("detour", "step"), absent=ABSENT)
    if "skipped" in log.fields and not log.fields["skipped"].differing:
        del log.fields["skipped"]  # no update was withheld, or the same ones
    require_something(log)
    validation = None
    if (a / VALIDATION).exists() and (b / VALIDATION).exists():
        # Which steps are validated, and over how many windows, is comfort: what both have is compared.
        validation = compare_records(a / VALIDATION, b / VALIDATION, ("detour", "step", "windows"), absent=ABSENT)
    for side in (log.a, log.b, *((validation.a, validation.b) if validation else ())):
        if side.source.count and number(side.source.key, side.source.last_key) is None:
            raise FormatError(f"{side.source.path}: {side.source.last} is not the number of a step")
    saved = [checkpoint.published(path / "checkpoints") for path in (a, b)]
    both = {step: pair(a, b, step) for step in sorted({*saved[0]} & {*saved[1]})}
    pairs = sorted((p for p in both.values() if p), key=lambda p: p.place)
    unpaired = [step for step, p in both.items() if p is None]
    first = _first(log, pairs, validation)
    events = {"a": _events(a), "b": _events(b)}
    why = sorted([*causes(*manifests), *_inexact(events)], key=lambda cause: not cause.decides)
    return Divergence(
        "runs", str(a), str(b), _headline(log, first, pairs, validation, why), first, log,
        [*remarks(log), *_lengths(log, first), *_unpaired(unpaired), *_notes(log, first, pairs, events, why)],
        pairs,
        sorted({*saved[0]} - {*saved[1]}), sorted({*saved[1]} - {*saved[0]}), validation, why, events,
    )  # fmt: skip


def _manifest(path: Path) -> dict[str, Any]:
    """Read run.json as it stands, so that runs of other versions of mlxdet can be compared too."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        parts = [*manifest["config"].values(), manifest["corpus"], manifest["environment"]["decides"]]
        parts += [manifest.get("code", {}), manifest.get("forked", {}), *manifest["corpus"].get("files", [])]
        whole = all(isinstance(p, dict) for p in parts)
    except FileNotFoundError:
        raise UsageError(f"{path}: not a run (no {MANIFEST} in it)") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{file}: damaged, not the manifest of a run")
    return manifest


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the events that are not routine: resumes, forks, interrupts, faults."""
    if not (path / EVENTS).exists():
        return []
    told = []
    for record in Records(path / EVENTS):
        try:
            e = json.loads(record.raw)
            wrong = [change for change in e.get("environment") or () if len(change) != 3]
        except (ValueError, TypeError):
            wrong = [record]
        if wrong:
            raise FormatError(f"{path / EVENTS}:{record.line}: damaged, not an event of a run")
        told.append(e)
    return [e for e in told if e.get("event") not in ROUTINE or e.get("reason") == "interrupted"]


def _first(log: RecordComparison, pairs: list[CheckpointPair], validation: RecordComparison | None) -> First | None:
    """Return the first difference of all that was seen. A step's log comes before its checkpoint and its validation."""
    stages = [n for n in STAGE_OF if n in log.fields] + [n for n in log.fields if n not in STAGE_OF]
    found = []
    differing = {n: f.first for n, f in validation.fields.items() if f.first} if validation else {}
    key = min((seen.a.key for seen in differing.values()), default=None)
    if logged := first_logged(log, {n: STAGE_OF.get(n, n) for n in stages}, LABELS):
        if logged.step is None:
            raise FormatError(f"{log.a.source.path}: {logged.at} is not the number of a step")
        logged = read_logged(logged, pairs)
        if logged.place == (0, 1) and key is not None and key[1][1] == 0:
            # Before step 1 there is nothing to have gone wrong in a step: the step's own stages tell more.
            also = "the validation before step 1 differs too: its text, the initial weights or the forward pass"
            logged, key = replace(logged, reading=f"{logged.reading}; {also}"), None
        found.append(logged)
    if moved := next((p for p in pairs if not p.identical), None):
        found.append(read_moved(moved, pairs))
    if key is not None:
        detour, step = int(key[0][1]), int(key[1][1])
        reading = f"the weights after it differ, or the validation itself; {seen_before(pairs, step + 1, detour)[1]}"
        fields = {n: seen.of(n) for n, seen in differing.items() if seen.a.key == key}
        label = LABELS["validation"]
        found.append(First(spell((detour, step)), step, "validation", label, reading, False, fields, detour=detour))
    return min(found, key=lambda f: f.place, default=None) or length(log)  # of one step, the first in this order


def _inexact(events: dict[str, list[dict[str, Any]]]) -> list[Cause]:
    """Return the resumes in another environment: from their step on, the manifest does not say where a run was made."""
    found = []
    for side, told in events.items():
        for e in told:
            for name, was, now in (e.get("environment") or ()) if e.get("event") == "resume" else ():
                text = f"{value(now)} from step {e.get('step')} on, instead of {value(was)}"
                x, y = (text, None) if side == "a" else (None, text)
                found.append(Cause("resume", name, x, y, True))
    return found


def _lengths(log: RecordComparison, first: First | None) -> list[str]:
    other = length(log)
    return [other.reading] if other and first and first.stage != "length" else []


def _unpaired(steps: list[int]) -> list[str]:
    if not steps:
        return []
    which = f"checkpoint{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:5]))}{', ...' if steps[5:] else ''}"
    return [f"{which} of A and B: not after the same number of rollbacks, or removed meanwhile; not compared"]


def _notes(
    log: RecordComparison, first: First | None, pairs: list[CheckpointPair], events: dict[str, list[dict[str, Any]]],
    why: list[Cause],
) -> list[str]:  # fmt: skip
    notes = []
    if not pairs:
        notes.append("no checkpoint is in both runs: weights were NOT compared, only what was logged")
    elif first is None and pairs[-1].step < int(log.a.source.last_key[1][1]):
        notes.append(f"the last common checkpoint is of step {pairs[-1].step}: weights after it were not compared")
    for side, told in events.items():
        for kind in dict.fromkeys(str(e.get("event")) for e in told):
            these = [e for e in told if str(e.get("event")) == kind]
            more = ["not exact: in another environment"] if any(e.get("exact") is False for e in these) else []
            more += [bare(str(these[-1]["reason"]))] if "reason" in these[-1] else []
            steps = ", ".join(str(e.get("step")) for e in these[:5]) + (", ..." if len(these) > 5 else "")
            at = f"at step{'s' if len(these) > 1 else ''} {steps}"
            notes.append(f"{side.upper()}: {bare(kind)} {bare(at)}{''.join(f', {m}' for m in more)}")
    if first is None and (decisive := dict.fromkeys(c.kind for c in why if c.decides)):
        notes.append(f"identical although the manifests differ in {', '.join(decisive)}")
    return notes


def _headline(
    log: RecordComparison, first: First | None, pairs: list[CheckpointPair], validation: RecordComparison | None,
    why: list[Cause],
) -> str:  # fmt: skip
    if first is None:
        seen = f"{len(pairs)} common checkpoints" if pairs else "weights NOT compared (no common checkpoint)"
        return f"identical: {extent(log)}; {seen}; {validation.common if validation else 0} common validations"
    reasons = [c for c in why if c.explains(first.stage)]
    lead = [f"different {kind}: {_named(told)}" for kind in KINDS if (told := [c for c in reasons if c.kind == kind])]
    if not lead and first.stage != "length":
        decisive = ", ".join(dict.fromkeys(c.kind for c in why if c.decides))
        lead = [f"no recorded cause ({decisive} differ, but cannot be why this stage is the first)" if decisive else
                "no recorded cause (same seeds, config, text, code and environment)"]  # fmt: skip
    return "; ".join([*lead, opening(first)])


def _named(told: list[Cause]) -> str:
    """Name up to three causes of one kind."""
    if told[0].kind == "resume":
        return ", ".join(f"{'A' if c.b is None else 'B'} {bare(c.name)} {c.b or c.a}" for c in told[:3])
    text = ", ".join(f"{bare(c.name)} {_pair(c)}" for c in told[:3])
    return text + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def _pair(cause: Cause) -> str:
    """Return both values, cut short where that leaves them different."""
    a, b = value(cause.a), value(cause.b)
    x, y = (v if len(v) <= 24 else f"{v[:20]}..." for v in (a, b))
    return f"{x} / {y}" if x != y else f"{a} / {b}"


def value(v: Any) -> str:
    """Return a value of a manifest for people: on one line, "none" where there is none."""
    return "none" if v is None else bare(v if isinstance(v, str) else json.dumps(v))
