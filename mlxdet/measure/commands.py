"""Run a command in a process of its own, and name what it wrote.

`{out}` in an argument stands for a fresh, empty directory. The process leads its own group, so that a time limit or
Ctrl-C ends whatever it started as well. What it prints goes to a file and is shown only when it fails.
"""

import fnmatch
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxdet.errors import Fault, UsageError
from mlxdet.formats import Checkpoint, open_checkpoint, sharded
from mlxdet.formats import run as runs
from mlxdet.formats.detect import identify
from mlxdet.formats.source import Source, escape, quote
from mlxdet.measure.values import INTEGERS

OUT = "{out}"
GRACE = 10.0  # seconds a process has after SIGTERM to save and go, before it is killed
# The files of a run of mlxdet that equal runs need not have equal.
PASSING = {"run.json", "timing.jsonl", "events.jsonl", ".lock"}


@contextmanager
def outputs(keep: str | Path | None) -> Iterator[Path]:
    """Yield the directory for outputs: the new directory `keep`, or a temporary one that is removed at the end."""
    if keep is None:
        with TemporaryDirectory(prefix="mlxdet-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)
        return
    path = Path(keep)
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--keep: {keep} cannot be made ({error.strerror}); name a new directory") from None
    yield path


def check_command(command: Sequence[str], what: str) -> None:
    """Raise UsageError if `command` is empty or has no {out} in it."""
    if not command:
        raise UsageError(f"{what}: no command; write it after `--`, with {OUT} where its output directory goes")
    if not any(OUT in argument for argument in command):
        raise UsageError(
            f"{what}: no argument holds {OUT}, so nothing can be compared; put {OUT} where the output directory goes "
            f"(for a program that writes where it stands: sh -c 'cd {OUT} && ...')"
        )


def run(
    command: Sequence[str],
    where: Path,
    name: str,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    show: bool = False,
    words: Mapping[str, str] | None = None,
) -> tuple[Path, float]:
    """Run `command` once in the new directory `where` and return (its output directory, seconds).

    `env` is added to the environment; `words` are replaced in the arguments besides {out}. With `show` the output goes
    to our stderr, else to `where`/output.txt. Raises UsageError if the command cannot be started, Fault, calling it
    `name`, if it fails or takes longer than `timeout` seconds.
    """
    out = where / "out"
    out.mkdir(parents=True)
    arguments = list(command)
    for word, value in {OUT: str(out.resolve()), **(words or {})}.items():
        arguments = [argument.replace(word, value) for argument in arguments]
    said = where / "output.txt"
    start = time.perf_counter()
    with said.open("wb") as file:
        sink = sys.stderr.fileno() if show else file
        try:
            child = subprocess.Popen(
                arguments, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=sink, stderr=subprocess.STDOUT if not show else sink, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{quote(arguments[0])} cannot be started: {error.strerror}") from None
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        _end(child)
        raise Fault(f"{name}: not done after {timeout:g} seconds (--timeout), so it was ended{_last(said)}") from None
    except BaseException:
        _end(child)
        raise
    _signal(child, signal.SIGKILL)  # what it started and left behind would go on writing
    if code:
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise Fault(f"{name}: the command failed, {how}{_last(said)}")
    return out, time.perf_counter() - start


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the whole process group: first asked, then killed."""
    _signal(child, signal.SIGTERM)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also on a second Ctrl-C
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(child.pid, number)


def _last(said: Path, lines: int = 8) -> str:
    """Return the last lines of an output, for a message, control characters escaped."""
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - 4000))
        text = file.read().decode("utf-8", "replace").strip().splitlines()[-lines:]
    if not text:
        return "; it said nothing"
    shown = [escape(line.replace("\t", " "))[:300] for line in text]
    return "; its last lines:" + "".join(f"\n  {line}" for line in shown)


@dataclass(frozen=True)
class Part:
    """Something a command wrote whose distance is measured on its own.

    `weights`: it belongs to the model. False for the state of an optimizer and for counters, whose size would hide the
    rest: the step number 1000 outweighs every moment.
    """

    name: str
    checkpoint: Checkpoint
    weights: bool = True


@dataclass(frozen=True)
class Written:
    """What a command wrote: parts that hold tensors, by name, and the other files, by name."""

    parts: Mapping[str, Part]
    files: Mapping[str, Path]


def written(root: Path, only: Sequence[str] = (), every: bool = False) -> Written:
    """Return what lies in the directory `root`, by relative path.

    A file of a known checkpoint format and a sharded checkpoint (by its index) are tensors. Of a run of mlxdet, the
    final checkpoint counts, or with `every` each one, and not the files that equal runs need not have equal. Links to
    directories are not followed. `only` keeps the paths that match one of its globs. Raises FormatError for a damaged
    checkpoint.
    """
    checkpoints: dict[str, Path] = {}
    files: dict[str, Path] = {}
    kept: Callable[[str], bool] = lambda name: not only or any(fnmatch.fnmatchcase(name, glob) for glob in only)  # noqa: E731
    for directory, below, names in os.walk(root):
        here = Path(directory)
        prefix = "" if here == root else here.relative_to(root).as_posix() + "/"
        below.sort()
        taken: set[str] = set()
        if steps := sorted(p for p in (here / runs.CHECKPOINTS).glob("[0-9]*") if runs.is_checkpoint(p)):
            checkpoints.update({prefix + f"{runs.CHECKPOINTS}/{p.name}": p for p in (steps if every else steps[-1:])})
            below.remove(runs.CHECKPOINTS)
            taken = PASSING
        elif runs.is_checkpoint(here):
            checkpoints[prefix.rstrip("/") or "."] = here
            taken = {runs.STATE, *runs.FILES}
        present = [name for name in names if name not in taken and (here / name).is_file()]
        indices = {name for name in present if name.endswith(".index.json") and _is_index(here / name)}
        held = {shard for name in indices for shard in sharded.shards(Source(here / name))}
        for name in present:
            if name in indices or (name not in held and _is_checkpoint_file(here / name)):
                checkpoints[prefix + name] = here / name
            elif name not in held:
                files[prefix + name] = here / name
    parts = [part for name in sorted(checkpoints) if kept(name) for part in _parts(name, checkpoints[name])]
    return Written({part.name: part for part in parts}, {name: files[name] for name in sorted(files) if kept(name)})


def _is_index(path: Path) -> bool:
    return path.stat().st_size > 0 and sharded.looks_like(Source(path))


def _is_checkpoint_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and identify(Source(path)) is not None


def _parts(name: str, path: Path) -> Iterable[Part]:
    """Split one checkpoint into its parts: what differs in scale by its nature is not added up."""
    whole = open_checkpoint(path)
    kinds: dict[str, list[str]] = {}
    for tensor, value in whole.tensors.items():
        if whole.format == "mlxdet-checkpoint":
            kind = tensor.rsplit(".", 1)[-1] if tensor.startswith("optimizer.") else ""
            kind = {"m": "first moments", "v": "second moments", "step": "counters"}.get(kind, kind)
        else:
            counts = value.dtype in INTEGERS or value.shape in ((), (1,))
            kind = "counters" if counts else ""
        kinds.setdefault(kind, []).append(tensor)
    if list(kinds) == ["counters"] and whole.format != "mlxdet-checkpoint":
        kinds = {"": kinds["counters"]}  # nothing else there that they could hide
    for kind in sorted(kinds):
        tensors = {tensor: whole.tensors[tensor] for tensor in kinds[kind]}
        told = kind or ("weights" if whole.format == "mlxdet-checkpoint" else "")
        yield Part(f"{name} ({told})" if told else name, replace(whole, tensors=tensors, tied=()), weights=not kind)
    if not kinds:
        yield Part(name, whole)
