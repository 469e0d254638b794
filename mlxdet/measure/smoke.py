"""The contract, proven on this machine in about a minute: fresh processes, a small model, learning rates that move
weights.

The first three lines are those of the original harness (step 0, same seed, another seed, by loss). The others look
where it did not: weights and moments by their bits, one step repeated, prefetch, cadence, kill -9 and resume, hash
order.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError
from mlxdet.measure.compare import Comparison, compare

STEPS, SEED, REPEATS = 12, 42, 20
RECIPE = (
    "--preset nano --batch 8 --accumulation 2 --dropout 0.1 --max-lr 3e-3 --min-lr 3e-3 --warmup 2 --val-windows 16 "
    f"--steps {STEPS} --val-every 6 --save-every 6"
).split()
DISTINCT_LOSS, DISTINCT_WEIGHTS = 1e-3, 0.1  # another seed must move losses and weights at least this far


@dataclass(frozen=True)
class Check:
    """One line: what was checked, whether it holds, and what was measured."""

    name: str
    holds: bool
    text: str
    numbers: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ChildFailed(Exception):
    """A training process ended with an error; the message is what it said."""


@dataclass(frozen=True)
class Children:
    """Runs `mlxdet` in processes of their own; `command` is its command line."""

    command: Sequence[str]
    where: Path
    device: str

    def _start(self, args: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self.command, *args], env=os.environ | env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def train(self, name: str, *flags: str, seed: int = SEED, **env: str) -> Path:
        """Train a run called `name` and return its directory. Raises ChildFailed."""
        out = self.where / name
        args = ["train", *RECIPE, "--device", self.device, "--seed", str(seed), "--out", str(out), "--json", *flags]
        self._wait(self._start(args, env))
        return out

    def killed_and_resumed(self, name: str, *flags: str, after: int) -> Path:
        """Train a run, kill -9 it once `after` steps are logged, resume it in a new process, return its directory."""
        out = self.where / name
        args = ["train", *RECIPE, "--device", self.device, "--seed", str(SEED), "--out", str(out), "--json", *flags]
        child = self._start([*args, "--throttle", "0.9"], {})
        while child.poll() is None:
            log = out / "metrics.jsonl"
            if log.exists() and log.read_bytes().count(b"\n") >= after:
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        child.communicate()
        if child.returncode != -signal.SIGKILL:
            raise ChildFailed(f"the run to be killed ended by itself (exit {child.returncode}) before step {after}")
        self._wait(self._start(["resume", str(out), "--throttle", "0", "--json"], {}))
        return out

    @staticmethod
    def _wait(child: "subprocess.Popen[str]") -> None:
        _, said = child.communicate()
        if child.returncode:
            lines = said.strip().splitlines() or ["(it said nothing)"]
            raise ChildFailed(f"exit {child.returncode}: {lines[-1]}")


def losses(run: Path) -> list[float]:
    """Return the exact losses of a run, in order."""
    records = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [float.fromhex(record["loss_hex"]) for record in records]


def divergence(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference of two loss curves, infinity if they are not equally long."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) if len(a) == len(b) and a else math.inf


def _final(run: Path, name: str) -> Path:
    return run / "checkpoints" / f"{STEPS:08d}" / name


def weights(a: Path, b: Path) -> Comparison:
    """Compare the final weights of two runs."""
    return compare(_final(a, "model.safetensors"), _final(b, "model.safetensors"))


def differences(a: Path, b: Path) -> list[str]:
    """Return which of the files that must be equal in two equal runs are not."""
    pairs = [(a / "metrics.jsonl", b / "metrics.jsonl")]
    pairs += [(_final(a, n), _final(b, n)) for n in ("model.safetensors", "optimizer.safetensors", "state.json")]
    return [p.name for p, q in pairs if not q.exists() or p.read_bytes() != q.read_bytes()]


def tolerance() -> float:
    """Return DETERMINISM_TOL (default 1e-2). Raises UsageError if it is not a positive number."""
    text = os.environ.get("DETERMINISM_TOL", "1e-2")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"DETERMINISM_TOL: {text!r} is not a number from 0 up")
    return value


def smoke(
    where: Path, device: str = "auto", command: Sequence[str] = (sys.executable, "-m", "mlxdet")
) -> Iterator[Check]:
    """Yield the checks one by one, training in the empty directory `where`.

    A failed training is a check that does not hold.
    """
    tol = tolerance()
    children = Children(command, where, device)
    try:
        a, b = children.train("a"), children.train("b")
        other = children.train("other-seed", seed=SEED + 1)
    except ChildFailed as error:
        yield Check("training", False, f"training failed: {error}", {})
        return
    la, lb, lo = losses(a), losses(b), losses(other)
    yield Check("step-0", la[0] == lb[0], f"step-0 {'bit-exact' if la[0] == lb[0] else 'differs'}: {la[0]:.6f}",
                {"loss": la[0], "loss_again": lb[0]})  # fmt: skip
    same, exact = divergence(la, lb), la == lb
    yield Check(
        "same seed, losses", same <= tol,
        f"same-seed max divergence: {same:.2e} ({'<=' if same <= tol else '>'} {tol:g}) - "
        f"{'bit-exact' if exact else 'not bit-exact'}", {"divergence": same, "tolerance": tol, "bit_exact": exact},
    )  # fmt: skip
    cross = divergence(la, lo)
    yield Check(
        "other seed, losses", cross > DISTINCT_LOSS,
        f"cross-seed divergence:    {cross:.2e} ({'distinct' if cross > DISTINCT_LOSS else 'NOT distinct'} trajectory)",
        {"divergence": cross},
    )  # fmt: skip
    found = weights(a, b)
    moved = [t.name for t in found.moved]
    yield Check("same seed, weights", found.identical,
                f"same-seed weights: relFro {_relfro(found, '.2e')}, {len(moved)} of {len(found.tensors)} tensors moved"
                f"{_some(moved)}",
                {"relFro": found.total.relfro, "moved": moved, "tensors": len(found.tensors)})  # fmt: skip
    found = weights(a, other)
    yield Check("other seed, weights", (found.total.relfro or 0.0) >= DISTINCT_WEIGHTS,
                f"other-seed weights: relFro {_relfro(found, '.3f')} (>= {DISTINCT_WEIGHTS})",
                {"relFro": found.total.relfro})  # fmt: skip
    yield _repeated(command, a)
    same_files = [
        ("prefetch 0", lambda: children.train("prefetch-0", "--no-prefetch")),
        ("prefetch 1", lambda: children.train("prefetch-1", "--prefetch", "1")),
        ("prefetch 4", lambda: children.train("prefetch-4", "--prefetch", "4")),
        ("other evaluation, sampling and save cadence",
         lambda: children.train("cadence", *["--val-every", "5", "--sample-every", "4", "--save-every", "3",
         "--log-every", "1"])),
        ("kill -9 and resume", lambda: children.killed_and_resumed("killed", "--save-every", "4", after=7)),
        ("another PYTHONHASHSEED", lambda: children.train("hash", PYTHONHASHSEED="12345")),
    ]  # fmt: skip
    for name, make in same_files:
        try:
            bad = differences(a, make())
            yield Check(
                name, not bad, f"{name}: {'bit-exact' if not bad else 'differs in ' + ', '.join(bad)}", {"differ": bad}
            )
        except ChildFailed as error:
            yield Check(name, False, f"{name}: {error}", {})


def _relfro(found: Comparison, spec: str) -> str:
    return f"undefined ({found.total.undefined})" if found.total.relfro is None else format(found.total.relfro, spec)


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""


def _repeated(command: Sequence[str], run: Path) -> Check:
    """Repeat one step in a process of its own, started as the children are, with `repeat` in the place of a verb."""
    done = subprocess.run([*command, "repeat-step", str(run), str(REPEATS)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
        return Check("one step repeated", False, f"one step repeated: {said}", {})
    result = json.loads(done.stdout)
    text = f"one step repeated: {result['identical']} of {result['n']} identical{_some(result['moved'])}"
    return Check("one step repeated", result["identical"] == result["n"], text, result)
