"""A run on disk: manifest, append-only logs of exact numbers, checkpoints, and one writer at a time.

`metrics.jsonl` and `validation.jsonl` hold nothing that depends on time or host, so two equal runs have equal files.
Every line is written whole in one call; what a crash left of a last line is cut when the run is opened for writing.
Steps logged beyond the checkpoint that a resume starts from are run again, and must give the logged line again.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlxdet import config as configs
from mlxdet.config import TrainConfig
from mlxdet.errors import Fault, UsageError
from mlxdet.training import checkpoint
from mlxdet.training.checkpoint import saving, sync_directory, sync_file
from mlxdet.training.detours import Detour, Past

MANIFEST, METRICS, VALIDATION, TIMING, EVENTS, LOCK = (
    "run.json",
    "metrics.jsonl",
    "validation.jsonl",
    "timing.jsonl",
    "events.jsonl",
    ".lock",
)


def line(record: dict[str, Any]) -> str:
    """Return the one spelling of a record: floats as repr, which reads back exactly. Raises ValueError on NaN."""
    return json.dumps(record, allow_nan=False)


def _key(record: dict[str, Any]) -> tuple[int, int]:
    """Return (detour, step): a rollback's new lines stand beside those of the branch that it left."""
    return record.get("detour", 0), record["step"]


def timeline(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of what the run is now: after a rollback, without the steps that it took back."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if record.get("detour"):
            while kept and kept[-1]["step"] >= record["step"] and kept[-1].get("detour", 0) < record["detour"]:
                kept.pop()
        kept.append(record)
    return kept


# What is read of a line, by its event, or by the log where it is no event.
NEEDED = {
    METRICS: ("loss", "grad_norm"),
    VALIDATION: ("loss",),
    "rollback": ("to", "detour"),
    "spike": ("loss", "grad_norm", "rows"),
    "non-finite": ("loss", "grad_norm", "rows"),
}


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of one of a run's logs; an unfinished last line is left out, no file has no lines.

    Raises UsageError, with the line, for what this log cannot hold.
    """
    found = []
    try:
        texts = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    for number, text in enumerate(texts, 1):
        try:
            record = json.loads(text)
            if not all(type(n) is int for n in (record["step"], record.get("detour", 0), record.get("to", 0))):
                raise ValueError
            for name in NEEDED.get(record.get("event", path.name), ()):
                record[name] if name in ("to", "detour", "rows") else float(record[name])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UsageError(f"{path}:{number}: not a line of this log; the file was changed") from None
        found.append(record)
    return found


class Log:
    """An append-only JSONL file. `keyed` ones check lines that are written again, by their "detour" and "step"."""

    def __init__(self, path: Path, keyed: bool):
        self.path = path
        self._known: dict[tuple[int, int], str] = {}
        self._cut()
        if keyed and path.exists():
            for number, text in enumerate(path.read_text().splitlines(), 1):
                try:
                    self._known[_key(json.loads(text))] = text
                except (ValueError, TypeError, KeyError):
                    raise UsageError(f"{path}:{number}: not a line of this log; the file was changed") from None
        self._file = path.open("ab", buffering=0)

    def _cut(self) -> None:
        """Drop an unfinished last line."""
        if self.path.exists():
            raw = self.path.read_bytes()
            whole = raw.rfind(b"\n") + 1
            if whole != len(raw):
                os.truncate(self.path, whole)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`; if its step is already logged, raise Fault unless the bits are the same."""
        text, step = line(record), record.get("step")
        known = self._known.get(_key(record)) if step is not None else None
        if known is None:
            data = (text + "\n").encode()
            with saving(str(self.path), "the last good checkpoint is untouched"):
                if self._file.write(data) != len(data):
                    raise OSError(28, "the disk is full")
        elif known != text:
            was = json.loads(known)
            if was.get("windows") != record.get("windows"):
                return  # validated over other windows, which is a matter of comfort: nothing to compare
            field = next(k for k in [*record, *was] if was.get(k) != record.get(k))
            raise Fault(
                f"step {step} did not reproduce: {field} was logged as {was.get(field)!r}, now it is "
                f"{record.get(field)!r} ({self.path.name}). Something outside the recipe changed: the machine, the "
                f"libraries or the files"
            )

    def forget_after(self, step: int, detour: int) -> None:
        """Drop the lines of later steps and detours: in another environment they need not come out the same."""
        kept = {k: text for k, text in self._known.items() if k[0] < detour or (k[0] == detour and k[1] <= step)}
        new = self.path.with_suffix(".new")
        with saving(str(self.path), "the last good checkpoint is untouched"):
            with new.open("wb") as file:
                file.write("".join(text + "\n" for text in kept.values()).encode())
                file.flush()
                sync_file(file.fileno())
            new.rename(self.path)
            self._file.close()
            self._file = self.path.open("ab", buffering=0)
        self._known = kept

    def sync(self) -> None:
        """Make the lines written so far survive a power cut."""
        with saving(str(self.path), "the last good checkpoint is untouched"):
            sync_file(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Run:
    """A run directory. Reading needs nothing; writing goes through open_logs(), which holds the lock."""

    def __init__(self, path: str | Path):
        """Open the run at `path`. Raises UsageError if it is not one."""
        self.path = Path(path)
        try:
            self.manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_bytes())
            self.config = configs.from_dict(self.manifest["config"], str(self.path / MANIFEST))
            self.recipe = recipe(self.config, self.manifest["corpus"], self.base)
            damaged = self.manifest["recipe"] != self.recipe
        except FileNotFoundError:
            raise UsageError(f"{self.path}: not a run (no {MANIFEST} in it)") from None
        except OSError as error:
            raise UsageError(f"{self.path / MANIFEST}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.path / MANIFEST}: damaged, not a manifest of this version") from None
        if damaged:
            raise UsageError(f"{self.path / MANIFEST}: changed since the run was made (recipe digest does not fit)")
        self.stopped: str | None = None  # why the last training of this run ended: "done" or "interrupted"
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def first(self) -> int:
        """The step this run goes on from: 0, or that of the checkpoint it was forked from."""
        return self.manifest.get("forked", {}).get("step", 0)

    @property
    def first_tokens(self) -> int:
        """The tokens trained up to there."""
        return self.manifest.get("forked", {}).get("tokens", 0)

    @property
    def base(self) -> str | None:
        """The content digest of the weights that it was started from with --from; None where they were drawn."""
        return self.manifest["base"]["digest"] if "base" in self.manifest else None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, ascending."""
        return checkpoint.published(self.checkpoints)

    def load(self, step: int | None = None) -> checkpoint.Snapshot:
        """Return the state of the checkpoint at `step` (default: the newest). Raises UsageError where there is none."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            has = f"it has {', '.join(map(str, steps))}" if steps else "it has none yet"
            raise UsageError(f"{self.path}: no checkpoint{'' if step is None else f' of step {step}'}; {has}")
        return checkpoint.load(checkpoint.directory(self.checkpoints, steps[-1] if step is None else step), self.recipe)

    def records(self, name: str = METRICS, *, branches: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the records of a log, whole lines only.

        Of metrics and validation, those of the run as it is now; with `branches` also those that a rollback took back.
        """
        whole = lines(self.path / name)
        yield from timeline(whole) if name in (METRICS, VALIDATION) and not branches else whole

    def past(self, step: int | None = None) -> Past:
        """Return what the run has been through up to `step` (default: its end), from its logs: the detours that the
        steps of the run as it is now have taken, and the updates withheld up to `step`."""
        logged = lines(self.path / METRICS)
        taken = self.rollbacks(logged)
        now = timeline(logged)
        skipped = sum(1 for r in now if r.get("skipped") and (step is None or r["step"] <= step))
        # An inexact resume from before a rollback may not take it again, so it is the lines that say.
        begun = max((r.get("detour", 0) for r in now), default=0)
        return Past(skipped, tuple(taken[n] for n in range(1, begun + 1)))

    def rollbacks(self, logged: list[dict[str, Any]]) -> dict[int, Detour]:
        """Return the rollbacks by number, from 1. `logged`: the lines of metrics.jsonl, read before (a rollback is an
        event before it is in a line). Raises UsageError where a line is of a rollback that is no event."""
        found = {e["detour"]: Detour(e["step"], e["to"]) for e in lines(self.path / EVENTS) if e["event"] == "rollback"}
        for r in logged:
            if r.get("detour", 0) not in (0, *found):
                raise UsageError(
                    f"{self.path / METRICS}: step {r['step']} is of a rollback that {EVENTS} does not have"
                )
        return found

    def acquire(self) -> None:
        """Become the one writer of this run. Raises UsageError if another process is."""
        handle = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise UsageError(f"{self.path}: another process is training this run; wait for it or stop it") from None
        self._lock = handle

    def release(self) -> None:
        """Let go of the lock (the kernel does it too, when the process dies)."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recipe(config: TrainConfig, corpus: dict[str, Any], base: str | None = None) -> str:
    """Return the digest of what decides a run's bits, on a given machine: settings (not comfort), the content of the
    corpus, and the content digest of the weights it starts from (not where they lie)."""
    decides = {
        name: getattr(getattr(config, f.section), name)
        for name, f in configs.FIELDS.items()
        if configs.decides(config, name)
    }
    decides |= {"base": base} if base is not None else {}
    content = {"config": decides, "corpus": corpus["digest"], "vocab": corpus["vocab"]}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def create(path: Path, manifest: dict[str, Any], overwrite: bool) -> Run:
    """Make a new run directory with its manifest, held by this process.

    Raises UsageError if something is there already, unless it is a run and `overwrite` is given.
    """
    leftover = {MANIFEST + ".new"}  # all that a crash before the manifest was published can leave
    if path.is_symlink() or (path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - leftover)):
        has = ", ".join(sorted(p.name for p in path.iterdir())[:6]) if path.is_dir() else "a file"
        if not overwrite or path.is_symlink() or not (path / MANIFEST).is_file():
            if not path.is_dir():
                raise UsageError(f"{path}: already there, and not a directory; choose another --out")
            way = "; --overwrite replaces it" if (path / MANIFEST).is_file() and not path.is_symlink() else ""
            raise UsageError(f"{path}: already there ({has}); choose another --out, or `mlxdet resume {path}`{way}")
        _remove(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / (MANIFEST + ".new")
        with temporary.open("wb") as file:
            file.write((json.dumps(manifest, indent=1) + "\n").encode())
            file.flush()
            sync_file(file.fileno())
        temporary.rename(path / MANIFEST)
        sync_directory(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot make the run directory ({error.strerror})") from None
    run = Run(path)
    run.acquire()
    return run


def _remove(path: Path) -> None:
    try:
        Run(path).acquire()  # not while somebody writes it; the handle dies with the directory
    except UsageError as error:
        if "another process" in str(error):
            raise
    (path / MANIFEST).unlink()
    shutil.rmtree(path)


class Logs:
    """The four logs of a run, open for writing."""

    def __init__(self, run: Run):
        for name in (METRICS, VALIDATION):
            lines(run.path / name)  # raises for a changed file, before any is open
        self.metrics = Log(run.path / METRICS, keyed=True)
        self.validation = Log(run.path / VALIDATION, keyed=True)
        self.timing = Log(run.path / TIMING, keyed=False)
        self.events = Log(run.path / EVENTS, keyed=False)

    def event(self, kind: str, **details: Any) -> None:
        """Append an event with the time of day. Events are for people and are never compared."""
        self.events.write({"event": kind, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **details})

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        for log in (self.metrics, self.validation, self.timing, self.events):
            log.close()
