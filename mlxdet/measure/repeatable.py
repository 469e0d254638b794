"""Is a function of MLX arrays repeatable? Evaluate it n times on the same inputs and compare every output to the bit.

A race shows only when the hardware does its work in another order, so what can be changed inside a process is changed
between evaluations: buffers come from the system, or from a cache full of NaN; another stream or another thread keeps
the device busy; outputs are evaluated one at a time, last one first. None of this changes the bits of a program without
races. Settings that MLX reads once (MLX_MAX_OPS_PER_BUFFER, MLX_BFS_MAX_WIDTH) need processes of their own, and are not
touched. Twenty that agree make a race unlikely, not impossible: `mlxdet.audit` finds it without luck.
"""

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import getclosurevars
from typing import Any

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx.utils import tree_flatten

from mlxdet.errors import UsageError
from mlxdet.formats import Tensor
from mlxdet.measure.numbers import Numbers, measure
from mlxdet.measure.trees import from_tree


@dataclass
class Moved:
    """An output that changed: in how many repetitions, and how far from the first evaluation at worst."""

    times: int = 0
    max_abs: float = 0.0
    relfro: float | None = None
    undefined: str | None = None  # why some repetition has no distance

    def add(self, numbers: Numbers) -> None:
        self.times += 1
        self.max_abs = max(self.max_abs, numbers.max_abs)
        if numbers.relfro is None:
            self.undefined = numbers.undefined
        else:
            self.relfro = max(self.relfro or 0.0, numbers.relfro)

    def __str__(self) -> str:
        far = [] if self.relfro is None else [f"max abs {self.max_abs:.2e}", f"relFro {self.relfro:.2e}"]
        return ", ".join([*far, self.undefined] if self.undefined else far)


@dataclass
class Repeatability:
    """`identical` of `n` evaluations had the bits of the first, itself included."""

    n: int
    identical: int = 0
    outputs: int = 0
    moved: dict[str, Moved] = field(default_factory=dict)  # by path in the tree of outputs
    under: dict[str, tuple[int, int]] = field(default_factory=dict)  # perturbation: (repetitions, of which moved)
    drew: list[str] = field(default_factory=list)  # global generators whose state a call moves

    def __str__(self) -> str:
        lines = [f"{self.identical} of {self.n} evaluations identical, {self.outputs} arrays compared"]
        worst = sorted(self.moved.items(), key=lambda item: (-item[1].times, item[0]))
        lines += [f"  moved: {path} in {m.times} of {self.n - 1} repetitions, {m}" for path, m in worst]
        if self.moved:
            lines.append("  under: " + ", ".join(f"{name} {k} of {of}" for name, (of, k) in self.under.items()))
        return "\n".join(lines)


class NotRepeatable(AssertionError):
    """Raised by assert_repeatable; `result` is the Repeatability."""

    def __init__(self, message: str, result: Repeatability):
        super().__init__(message)
        self.result = result


def assert_repeatable(fn: Callable[..., Any], *args: Any, n: int = 20, seed: int | None = None) -> Repeatability:
    """Evaluate fn(*args) n times, and return what was found if every output has the same bits each time.

    Outputs: one array, or any tree of lists, tuples, dicts and modules of arrays (MLX or numpy), numbers and None. Bits
    are compared, so a NaN equals itself and -0 is not +0. `seed`: start the global generators of MLX, numpy and Python
    from it before each evaluation. Generators and MLX's cache limit are put back as they were.

    Raises NotRepeatable (an AssertionError) with k of n and each output that moved. Raises UsageError if calls cannot
    be compared: n < 2, no array comes out, nothing is evaluated anew, or a call changes what the next one starts from.
    """
    if n < 2:
        raise UsageError(f"n={n}: repeating needs at least two evaluations")
    held = _held(fn, args)
    before = {name: _digests(value) for name, value in held.items()}
    result = Repeatability(n)
    first: dict[str, Tensor] = {}
    earlier: list[mx.array] = []
    generators = _Generators()
    try:
        for i in range(n):
            name, perturbed = PERTURBATIONS[i % len(PERTURBATIONS)]
            if seed is not None:
                generators.start(seed)
            states = generators.states()
            with perturbed(first):
                outputs = fn(*args)
                leaves = [leaf for _, leaf in tree_flatten(outputs)]
                arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
                if not arrays and not any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
                    raise UsageError("fn returns no array, so there is nothing to compare")
                _evaluate(arrays, one_by_one=name == ONE_BY_ONE)
                got = dict(from_tree({"output": outputs}, "fn").tensors)
            result.drew += [g for g in generators.moved(states) if g not in result.drew]
            if i == 0:
                first = _checked(got, {name: _digests(value) for name, value in held.items()}, before)
                result.outputs = len(first)
            elif arrays and all(any(a is b for b in earlier) for a in arrays):
                raise UsageError("fn returns the arrays of its last call again: nothing is evaluated a second time")
            earlier = arrays
            moved = _compare(first, got, result.moved)
            result.identical += not moved
            if i:
                times, of_which = result.under.get(name, (0, 0))
                result.under[name] = times + 1, of_which + moved
    finally:
        generators.restore()
    if result.moved:
        raise NotRepeatable(_message(result, seed), result)
    return result


def _evaluate(arrays: list[mx.array], one_by_one: bool) -> None:
    for group in reversed(arrays) if one_by_one else [arrays]:
        mx.eval(group)


def _checked(got: dict[str, Tensor], after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Tensor]:
    for name, digests in before.items():
        changed = sorted(k for k in digests.keys() | after[name].keys() if digests.get(k) != after[name].get(k))
        if changed:
            raise UsageError(
                f"a call changes {name} ({changed[0] or 'the array'}, {len(changed)} in all), so the next one starts "
                f"elsewhere: return gradients or new values instead of updating, or put it back inside the function"
            )
    return got


def _compare(first: Mapping[str, Tensor], got: Mapping[str, Tensor], moved: dict[str, Moved]) -> bool:
    """Note in `moved` every output that is not that of the first evaluation, and return whether there is any."""
    some = False
    for path in sorted(first.keys() | got.keys()):
        a, b = first.get(path), got.get(path)
        where = path.removeprefix("output.") if path != "output" else path
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            moved.setdefault(where, Moved()).times += 1
            moved[where].undefined = "another shape, dtype or structure"
            some = True
        elif a.data.tobytes() != b.data.tobytes():
            moved.setdefault(where, Moved()).add(measure(a.dtype, a.data, b.dtype, b.data))
            some = True
    return some


def _message(result: Repeatability, seed: int | None) -> str:
    if result.drew and seed is None:
        reason = (
            f"each call draws other random numbers from {' and '.join(result.drew)}, so this does not show a race: "
            "pass seed=, or give the function its keys"
        )
    else:
        reason = "the inputs were the same, so something in it races or keeps state between calls"
    return f"not repeatable: {reason}\n{result}"


def _held(fn: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return what a call starts from, by name: its arguments, and what the function is bound to or closes over."""
    held: dict[str, Any] = {f"argument {i}": a for i, a in enumerate((*getattr(fn, "args", ()), *args))}
    inner = getattr(fn, "func", fn)  # of a functools.partial
    held["the function"] = fn
    held["self"] = getattr(inner, "__self__", None)
    inner = getattr(inner, "__func__", inner)
    if hasattr(inner, "__code__"):
        variables = getclosurevars(inner)
        held |= {f"variable {k}": v for k, v in {**variables.globals, **variables.nonlocals}.items()}
    return {name: value for name, value in held.items() if _digests(value)}


def _digests(value: Any) -> dict[str, bytes]:
    """Return a digest of every array of an array, module, optimizer or tree of those; empty for anything else."""
    if isinstance(value, mlx.optimizers.Optimizer):
        value = value.state
    if not isinstance(value, mx.array | dict | list | tuple):
        return {}
    arrays = {k: v for k, v in tree_flatten(value) if isinstance(v, mx.array)}
    return {
        name: hashlib.blake2b(tensor.data.tobytes()).digest()
        for k, v in arrays.items()
        for name, tensor in from_tree({k: v}, "fn").tensors.items()
    }


class _Generators:
    """The global random generators, as they were when this object was made."""

    def __init__(self) -> None:
        self._kept = self.states()

    def states(self) -> dict[str, Any]:
        state: Any = np.random.get_state()
        draws: Any = mx.random.state
        return {
            "mx.random": draws[0].tolist(),
            "numpy.random": (state[0], state[1].tobytes(), *state[2:]),
            "random": random.getstate(),
        }

    def moved(self, before: Mapping[str, Any]) -> list[str]:
        return [name for name, state in self.states().items() if state != before[name]]

    def start(self, seed: int) -> None:
        mx.random.seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)

    def restore(self) -> None:
        high, low = self._kept["mx.random"]
        mx.random.seed(high << 32 | low)
        kind, keys, *rest = self._kept["numpy.random"]
        np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
        random.setstate(self._kept["random"])


First = Mapping[str, Tensor]
ONE_BY_ONE = "outputs one at a time"
JUNK_BYTES = 64 << 20  # at most, of NaN left in the cache
BUSY = 256  # side of the matrices that keep the device busy: short products, so that they interleave


@contextmanager
def _as_is(first: First) -> Iterator[None]:
    yield


@contextmanager
def _fresh_buffers(first: First) -> Iterator[None]:
    mx.clear_cache()
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)


@contextmanager
def _used_buffers(first: First) -> Iterator[None]:
    """Leave buffers of the outputs' sizes, full of NaN, in the cache: what is read before it is written becomes NaN."""
    sizes = [t.data.size // 4 + 1 for t in first.values()] + [1 << k for k in range(2, 20)]
    junk, total = [], 0
    for size in sizes:
        if total + 4 * size <= JUNK_BYTES:
            junk.append(mx.full((size,), float("nan")))
            total += 4 * size
    mx.eval(junk)
    del junk
    yield


@contextmanager
def _busy_stream(first: First) -> Iterator[None]:
    """Queue products on a second stream, so that the device works on both."""
    stream = _second_stream()
    with mx.stream(stream):
        x = mx.ones((BUSY, BUSY))
        for _ in range(4):
            x = x @ x * (1 / BUSY)
    mx.async_eval(x)
    try:
        yield
    finally:
        mx.synchronize(stream)


_streams: dict[tuple[int, str], Any] = {}


def _second_stream() -> Any:
    """Return one more stream of the default device; one per thread, as MLX never gives streams back."""
    device = mx.default_device()
    key = threading.get_ident(), str(device)
    if key not in _streams:
        _streams[key] = mx.new_stream(device)
    return _streams[key]


@contextmanager
def _busy_thread(first: First) -> Iterator[None]:
    """Let a second thread evaluate products meanwhile: it competes for the device, the host and the buffers."""
    done = threading.Event()
    device = mx.default_device()

    def work() -> None:
        with mx.stream(device):
            while not done.is_set():
                x = mx.ones((BUSY, BUSY))
                mx.eval(x @ x)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


PERTURBATIONS: tuple[tuple[str, Callable[[First], Any]], ...] = (
    ("nothing changed", _as_is),
    ("fresh buffers", _fresh_buffers),
    ("buffers full of NaN", _used_buffers),
    ("a busy stream", _busy_stream),
    ("a busy thread", _busy_thread),
    (ONE_BY_ONE, _as_is),
)
