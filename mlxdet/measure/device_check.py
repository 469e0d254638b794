"""Everything that is claimed about a device, tried on it: `python -m mlxdet.backends.cuda.check` and `...metal.check`.

  rules    the audit's example programs, at sizes for a GPU: what is listed as safe must repeat, n of n; what is listed
           as racing should be seen to race, and is reported where it was not
  kernels  mlxdet's own kernels, forward and gradient: n of n, and against float64
  cost     the time of a training step with deterministic kernels over that with MLX's own
  smoke    `mlxdet smoke` on the device

Every part runs in processes of its own, under a share of the time; what a part had no time for is reported as not run.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from mlxdet.backends import KERNELS, select
from mlxdet.backends.fingerprint import installed
from mlxdet.errors import Fault, UsageError
from mlxdet.measure.device_cost import CASES, LEAST_ROUNDS, MOST_ROUNDS, TURN, WARM, Case, spread
from mlxdet.measure.device_worker import CONTRACT, FAILS, HOLDS, MARK, MEASURED, NOT_RUN, NOT_SEEN, NOTHING, Row, Spec

SHARES = {"rules": 28, "kernels": 12, "cost": 18, "smoke": 42}  # of the time
PARTS = tuple(SHARES)
TRIES, QUICK_TRIES = 300, 50
PYTHON = (sys.executable, "-m")


@dataclass
class Result:
    """All that was measured. `environment`: by kind of kernels, what a process of that kind ran on."""

    device: str
    rules: str
    rows: list[Row] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # part: why
    seconds: dict[str, float] = field(default_factory=dict)

    def by(self, *verdicts: str) -> list[Row]:
        return [row for row in self.rows if row.verdict in verdicts]

    @property
    def holds(self) -> bool:
        """Whether nothing failed and nothing that was asked for is missing. A race not seen is neither."""
        return bool(self.rows) and not self.by(FAILS, NOT_RUN)

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return {
            "holds": self.holds,
            "failed": [f"{row.part}: {row.name}" for row in self.by(FAILS)],
            "not_run": [f"{row.part}: {row.name}" for row in self.by(NOT_RUN)],
            "not_seen_to_race": [row.name for row in self.by(NOT_SEEN)],
            "cut": [f"{row.part}: {row.name}" for row in self.rows if row.cut],
            "mlxdet": installed("mlxdet"),
            **asdict(self),
        }


def check(
    device: str,
    rules: str | None = None,
    parts: Sequence[str] = PARTS,
    quick: bool = False,
    minutes: float = 5.0,
    tries: int | None = None,
    large: bool = True,
    cases: Sequence[Case] = CASES,
    say: Callable[[str], None] = lambda text: None,
    python: Sequence[str] = PYTHON,
) -> Result:
    """Run `parts` on `device` in at most `minutes`, and return what was found.

    `rules`: whose rules are tried; tests try those of another device, `tries` times, at the examples' own sizes
    (`large` False), in processes that `python` starts (a command that takes a module's name). Raises UsageError if the
    device is not here, or if a variable is set that would hide the difference between the two kinds of kernels.
    """
    select(device)
    _not_set(device)
    if quick:
        cases = [case for case in cases if case.preset != "small"]
    tries = tries or (QUICK_TRIES if quick else TRIES)
    c = _Check(device, rules or device, tries, large, tuple(python))
    if quick and "smoke" in parts and len(parts) > 1:
        c.result.left_out["smoke"] = "--quick"
    chosen = [part for part in PARTS if part in parts and part not in c.result.left_out]
    c.end = time.monotonic() + 60 * minutes * (0.25 if quick else 1.0)
    c.facts()
    for i, part in enumerate(chosen):
        began = time.monotonic()
        share = (c.end - began) * SHARES[part] / sum(SHARES[p] for p in chosen[i:])
        say(f"{part}: about {share:.0f} s at most")
        if part == "cost":
            c.cost(share, cases)
        elif part == "smoke":
            c.smoke(share)
        else:
            c.programs(part, share)
        c.result.seconds[part] = round(time.monotonic() - began, 1)
    return c.result


def _not_set(device: str) -> None:
    """Refuse variables that one kind of kernels pins and the other leaves to the user."""
    pins = import_module(f"mlxdet.backends.{device}").pins
    pinned = pins("deterministic").keys() - pins("default").keys()
    for variable in sorted(pinned & os.environ.keys()):
        raise UsageError(f"{variable} is set, but the check runs with and without it; unset it")


class _Child:
    """A process in a group of its own, stopped with all that it started after `seconds`, or when the block is left."""

    def __init__(self, command: Sequence[str], seconds: float):
        self.command, self.seconds, self.late, self.code = command, seconds, False, 0

    def __enter__(self) -> "_Child":
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._timer = threading.Timer(self.seconds, self._too_late)
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._stop()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):  # what it had not read cannot be delivered
                file.close()  # type: ignore[union-attr]

    def _too_late(self) -> None:
        self.late = True
        self._stop()

    def _stop(self) -> None:
        """Interrupt the group, so that it can tidy up, and kill what is left of it."""
        for number, patience in ((signal.SIGINT, 5.0), (signal.SIGKILL, None)):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what it writes, until it ends."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                yield json.loads(line[len(MARK) :])

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return its answer; None if it has ended."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return next(self.messages(), None)
        return None

    def output(self) -> str:
        """Return all that it prints, when it has ended."""
        assert self._process.stdout
        return self._process.stdout.read()

    def ended(self) -> str:
        """Wait for its end and say why it ended; "" if well."""
        self.code = self._process.wait()
        if self.late:
            return f"stopped after {self.seconds:.0f} s"
        if self.code == 0:
            return ""
        self._errors.seek(0)
        said = (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]
        if self.code == 2:
            return said
        how = signal.Signals(-self.code).name if self.code < 0 else f"exit {self.code}"
        return f"its process ended ({how}): {said}"


@dataclass
class _Check:
    device: str
    rules: str
    tries: int
    large: bool
    python: tuple[str, ...]
    end: float = 0.0

    def __post_init__(self) -> None:
        self.result = Result(self.device, self.rules)

    def _worker(self, spec: Spec, seconds: float) -> "_Child":
        return _Child([*self.python, "mlxdet.measure.device_worker", json.dumps(asdict(spec))], seconds)

    def facts(self) -> None:
        """Record what a process runs on, for each kind of kernels. Raises UsageError if one cannot."""
        for kernels in KERNELS:
            with self._worker(Spec("facts", self.device, kernels), self._limit(60.0)) as child:
                found = next(child.messages(), None)
                ended = child.ended()
            if found is None:
                kind = UsageError if child.code == 2 else Fault
                raise kind(ended.removeprefix("mlxdet: "))
            self.result.environment[kernels] = found["environment"]

    def programs(self, part: str, seconds: float) -> None:
        """Run the programs of a part; if one takes its process down, the next process goes on after it."""
        began, limit = time.monotonic(), self._limit(seconds)
        plan: list[str] | None = None
        rows: dict[str, Row] = {}
        ended = ""
        while plan is None or len(rows) < len(plan):
            spent = time.monotonic() - began
            # The catalogue is about MLX as people run it; the kernels, about mlxdet as it runs.
            kernels = "default" if part == "rules" else "deterministic"
            left = max(0.0, seconds - spent)
            spec = Spec(part, self.device, kernels, self.rules, self.large, self.tries, left, tuple(rows))
            begun = None
            with self._worker(spec, limit - spent) as child:
                for message in child.messages():
                    if "plan" in message:
                        plan = plan or message["plan"]
                    elif "begin" in message:
                        begun = message["begin"]
                    else:
                        rows[message["row"]["name"]], begun = Row(**message["row"]), None
                ended = child.ended()
            if begun is not None:
                rows[begun] = Row(part, begun, NOTHING, NOT_RUN, ended)
            if begun is None or child.late:
                break
        for name in plan or ["all programs"]:
            missing = Row(part, name, NOTHING, NOT_RUN, ended or "its process ended without a result")
            self.result.rows.append(rows.get(name, missing))

    def cost(self, seconds: float, cases: Sequence[Case]) -> None:
        """Time the two kinds of kernels in turns."""
        until, limit = time.monotonic() + seconds, self._limit(seconds)
        commands = [[*self.python, "mlxdet.measure.device_cost", self.device, k] for k in KERNELS]
        with _Child(commands[0], limit) as ours, _Child(commands[1], limit) as theirs:
            for i, case in enumerate(cases):
                left = until - time.monotonic()
                if left <= 0:
                    why = f"the {seconds:.0f} s for this part were over"
                    self.result.rows.append(Row("cost", str(case), NOTHING, NOT_RUN, why))
                else:
                    share = time.monotonic() + left / (len(cases) - i)
                    self.result.rows.append(_ratio(case, ours, theirs, share))

    def smoke(self, seconds: float) -> None:
        """Run `mlxdet smoke` and take over its lines."""
        with _Child(
            [*self.python, "mlxdet", "smoke", "--device", self.device, "--json"], self._limit(seconds)
        ) as child:
            text = child.output()
            ended = child.ended()
        try:
            checks = json.loads(text)["checks"]
        except (ValueError, KeyError, TypeError):
            self.result.rows.append(Row("smoke", "mlxdet smoke", NOTHING, NOT_RUN, ended or "it printed no JSON"))
            return
        for c in checks:
            self.result.rows.append(Row("smoke", c["name"], CONTRACT, HOLDS if c["holds"] else FAILS, c["text"]))

    def _limit(self, seconds: float) -> float:
        """Return the seconds after which a part's process is stopped: its share and a little, within the whole."""
        return max(1.0, min(1.3 * seconds + 10, self.end - time.monotonic()))


def _ratio(case: Case, ours: "_Child", theirs: "_Child", until: float) -> Row:
    name, n, steps = str(case), 0, WARM
    arms = list(zip(KERNELS, (ours, theirs), strict=True))
    times: dict[str, list[float]] = {kind: [] for kind, _ in arms}
    while n <= MOST_ROUNDS and (n <= LEAST_ROUNDS or time.monotonic() < until):
        for kind, child in arms if n % 2 == 0 else arms[::-1]:
            answer = child.ask({"case": asdict(case), "steps": steps})
            if answer is None:
                return Row("cost", name, NOTHING, NOT_RUN, f"{kind} kernels: {child.ended()}")
            times[kind].append(statistics.median(answer["seconds"]))
        if n == 0:  # the warm-up
            both = sum(times[kind].pop() for kind in times)
            left = max(0.0, until - time.monotonic())
            steps = max(1, min(TURN, int(left / (MOST_ROUNDS / 2) / both)))
        n += 1
    n -= 1
    ratio = spread([a / b for a, b in zip(times["deterministic"], times["default"], strict=True)])
    took = {kind: 1000 * statistics.median(values) for kind, values in times.items()}
    text = (
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}): {took['deterministic']:.2f} ms "
        f"a step, default kernels {took['default']:.2f} ms; {n} rounds"
    )
    return Row("cost", name, NOTHING, MEASURED, text, None, n, MOST_ROUNDS, cut=n < MOST_ROUNDS)
