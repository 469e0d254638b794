"""The child of the device check: runs programs many times on one device and writes a line of JSON for each.

`python -m mlxdet.measure.device_worker SPEC`, SPEC as JSON with the fields of Spec. A process of its own, as MLX reads
its settings once, and as a program that takes the process down must not take the others' results with it. Lines start
with a mark, since libraries write to stdout too: {"plan": [names], "environment": ...}, {"begin": name}, {"row": ...}.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mlxdet import backends
from mlxdet.errors import MlxdetError

MARK = "\x01"
LEAST = 6  # evaluations that every program gets, however little time is left: each perturbation once
ENOUGH = 24  # evaluations after which one that has raced need not go on

HOLDS, FAILS, NOT_SEEN, NOT_RUN, NO_CLAIM, MEASURED = (
    "holds", "fails", "not seen", "not run", "no claim", "measured")  # fmt: skip
REPEATS, RACES, CONTRACT, NOTHING = "repeats", "can race", "contract", "none"


@dataclass(frozen=True)
class Row:
    """One line of the table. `distinct` of `n` results differ; `identical` have the bits of the first."""

    part: str
    name: str
    claim: str
    verdict: str
    text: str
    rule: str | None = None
    n: int = 0
    asked: int = 0
    identical: int = 0
    distinct: int = 0
    error: float | None = None
    limit: float | None = None
    cut: bool = False  # fewer evaluations than asked for, as time was up


@dataclass(frozen=True)
class Spec:
    """What a child does. Part "facts" has no programs: the child says what it runs on, and ends."""

    part: str
    device: str
    kernels: str
    rules: str = ""  # whose rules are tried
    large: bool = True  # at sizes for a GPU
    n: int = 0  # evaluations of each program
    seconds: float = 0.0  # for all of them
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """What repeating a program gave."""

    n: int
    identical: int
    distinct: int
    first: list[Any]


def repeat(fn: Callable[..., Any], args: tuple[Any, ...], n: int, until: float, stop_at_race: bool = False) -> Repeated:
    """Evaluate fn(*args) up to n times under the perturbations of assert_repeatable and compare the bits.

    Compared on the device; what differs is fetched, to count the distinct results. Stops when time.monotonic() is past
    `until`, after LEAST evaluations, and with `stop_at_race` after ENOUGH if the result has moved.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxdet.measure.repeatable import ONE_BY_ONE, PERTURBATIONS
    from mlxdet.measure.trees import from_tree

    first: list[Any] = []
    buffers: Any = {}
    others: set[bytes] = set()
    done = identical = 0
    while done < n:
        if done >= LEAST and (time.monotonic() > until or (stop_at_race and others and done >= ENOUGH)):
            break
        name, perturbed = PERTURBATIONS[done % len(PERTURBATIONS)]
        with perturbed(buffers):
            arrays = [a for _, a in tree_flatten(fn(*args))]
            for group in reversed([[a] for a in arrays]) if name == ONE_BY_ONE else [arrays]:
                mx.eval(group)
        done += 1
        if not first:
            first, buffers = arrays, from_tree(arrays, "fn").tensors
        if all(mx.array_equal(_bits(a), _bits(b)).item() for a, b in zip(first, arrays, strict=True)):
            identical += 1
        else:
            tensors = from_tree(arrays, "fn").tensors
            others.add(hashlib.blake2b(b"".join(t.data.tobytes() for t in tensors.values())).digest())
    return Repeated(done, identical, len(others) + 1, first)


def _bits(a: Any) -> Any:
    import mlx.core as mx

    return a.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[a.dtype.size])


class Worker:
    """Runs the programs of one part."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.backend = backends.activate(spec.device, spec.kernels)
        self.programs = {k: v for k, v in self._programs().items() if k not in spec.skip}
        self.end = time.monotonic() + spec.seconds

    def run(self) -> None:
        pins = dict(self.backend.pins)
        _write({"plan": list(self.programs), "environment": {"pins": pins, **self.backend.fingerprint()}})
        for left, (name, program) in zip(range(len(self.programs), 0, -1), self.programs.items(), strict=True):
            _write({"begin": name})
            now = time.monotonic()
            until = now + max(0.0, self.end - now) / left
            try:
                row = program(until)
            except Exception as error:
                said = " ".join(str(error).split())
                row = Row(self.spec.part, name, NOTHING, NOT_RUN, f"{type(error).__name__}: {said}")
            _write({"row": asdict(row)})

    def _programs(self) -> dict[str, Callable[[float], Row]]:
        if self.spec.part == "facts":
            return {}
        if self.spec.part == "rules":
            return self._examples()
        from mlxdet.measure.device_kernels import kernels

        found = kernels(cpu=self.backend.name == "cpu")
        return {kernel.name: lambda until, k=kernel: self._kernel(k, until) for kernel in found}  # type: ignore[misc]

    def _examples(self) -> dict[str, Callable[[float], Row]]:
        from mlxdet.auditing.examples import EXAMPLES
        from mlxdet.auditing.rules import RULES

        found: dict[str, Callable[[float], Row]] = {}
        for rule in RULES.values():
            for example in EXAMPLES:
                if example.rule == rule.id:
                    found[example.name] = lambda until, e=example: self._example(e, until)  # type: ignore[misc]
            if rule.unknown and self.spec.rules in rule.devices:
                why = f"unknown to the audit: {rule.mechanism}"
                row = Row("rules", rule.id, NOTHING, NO_CLAIM, why, rule.id)
                found[rule.id] = lambda until, row=row: row  # type: ignore[misc]
        return found

    def _example(self, example: Any, until: float) -> Row:
        from mlxdet.auditing.rules import RULES
        from mlxdet.measure.device_programs import program

        fn, args = program(example, self.spec.large)
        races = example.leaks and self.spec.rules in RULES[example.rule].devices
        r = repeat(fn, args, self.spec.n, until, stop_at_race=races)
        moved = r.distinct > 1
        if races:
            claim, verdict = RACES, HOLDS if moved else NOT_SEEN
            text = f"{r.distinct} of {r.n} distinct" if moved else f"not seen to race ({r.n} tries)"
        else:
            claim, verdict = REPEATS, FAILS if moved else HOLDS
            text = f"{r.identical} of {r.n} identical"
        return Row("rules", example.name, claim, verdict, text, example.rule, r.n, self.spec.n, r.identical, r.distinct,
                   cut=r.n < self.spec.n and not (races and moved))  # fmt: skip

    def _kernel(self, kernel: Any, until: float) -> Row:
        from mlxdet.measure.device_kernels import worst

        fn, args, reference = kernel.make(self.spec.large)
        r = repeat(fn, args, self.spec.n, until)
        error, output = worst(r.first, reference, kernel.outputs)
        text = f"{r.identical} of {r.n} identical; {error:.1e} from float64 ({output})"
        text += "" if error <= kernel.limit else f", more than {kernel.limit:.0e}"
        holds = r.identical == r.n and error <= kernel.limit
        return Row("kernels", kernel.name, REPEATS, HOLDS if holds else FAILS, text, None, r.n, self.spec.n,
                   r.identical, r.distinct, error, kernel.limit, cut=r.n < self.spec.n)  # fmt: skip


def _write(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def main() -> None:
    """Run the part that the command line describes."""
    try:
        Worker(Spec(**json.loads(sys.argv[1]))).run()
    except MlxdetError as error:
        print(f"mlxdet: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        main()
