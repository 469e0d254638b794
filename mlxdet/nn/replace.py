"""Walk an existing model and give what leaks on a device code that does the same in a fixed order.

A module is replaced by changing its class, not the object: parameters, frozen names, training mode, and every other
reference to it (tied layers, closures, an optimizer) stay what they are, and checkpoints load as before. The new class
is derived from the old one, so `isinstance`, names and methods hold. A subclass of a leaking layer with a `__call__` of
its own is left and reported: only its author knows what that does.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import mlx.nn

from mlxdet.backends.cuda.pins import pins as cuda_pins
from mlxdet.backends.devices import DEVICES
from mlxdet.backends.metal import pins as metal_pins
from mlxdet.errors import UsageError
from mlxdet.nn import leaks


@dataclass(frozen=True)
class Replaced:
    """One module that changed its class. `paths`: every place in the model where it is."""

    paths: tuple[str, ...]
    was: str
    now: str
    why: str


@dataclass(frozen=True)
class Left:
    """One module that stays and may give other bits, why, and what to do."""

    paths: tuple[str, ...]
    what: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """What `make_deterministic` did and what it left. `str()` of it is for people."""

    target: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  # of the environment, that are not as they should be

    def __str__(self) -> str:
        head = f"target {self.target}: {_count(self.replaced)} replaced, {_count(self.left)} left that may leak"
        lines = [head] if self.target != "cpu" else [f"{head} (nothing does, on the CPU)"]
        for (was, now, why), paths in _grouped((r.paths, (r.was, r.now, r.why)) for r in self.replaced):
            lines += [f"  replaced {paths}", f"    {was} -> {now}: {why}"]
        for (what, why, remedy), paths in _grouped((r.paths, (r.what, r.why, r.remedy)) for r in self.left):
            lines += [f"  left {paths}", f"    {what}: {why}. Remedy: {remedy}"]
        lines += [f"  environment: {line}" for line in self.settings]
        return "\n".join([*lines, "  Only modules are seen here. mlxdet.audit(step, ...) sees every operation."])


def _count(rows: list[Replaced] | list[Left]) -> str:
    return f"{len(rows)} module{'' if len(rows) == 1 else 's'}"


def _grouped(rows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each key once, with the paths that have it on one line; the places of one module are joined by '='."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for paths, key in rows:
        groups.setdefault(key, []).append(" = ".join(path or "the model itself" for path in paths))
    for key, names in groups.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield key, ", ".join(names[:3]) + more


def make_deterministic(model: mlx.nn.Module, target: str | None = None) -> Report:
    """Replace, in place, the modules of `model` that can give different bits on `target`, and return what was done.

    `target`: "metal", "cuda" or "cpu"; by default the device MLX runs on. On the CPU nothing leaks, so nothing changes.
    Call it after adapters (LoRA) are in, and before a step with the model is compiled and first called: a compiled step
    keeps the graph it was traced with. Calling it again changes nothing. Raises UsageError, with the model untouched,
    if it is not an MLX module or the target not a device.
    """
    if not isinstance(model, mlx.nn.Module):
        raise UsageError(f"make_deterministic needs an mlx.nn.Module, not {type(model).__name__}")
    target = _here() if target is None else target
    if target not in DEVICES:
        raise UsageError(f"target {target}: it is {', '.join(DEVICES)}")
    report = Report(target, settings=_settings(target))
    for paths, module in _modules(model):
        kind = type(module)
        new, refused = _replacement(kind, target)
        if new is not None:
            module.__class__ = new.kind
            report.replaced.append(Replaced(paths, _name(kind), new.now, new.why))
        suspects = [] if refused is None else [refused]
        report.left.extend(Left(paths, _name(kind), *both) for both in (*suspects, *leaks.suspects(module, target)))
    return report


@dataclass(frozen=True)
class _New:
    kind: type
    now: str
    why: str


_made: set[type] = {rule.mixin(object) for rule in leaks.RULES if rule.now.startswith("mlxdet.nn.")}  # type: ignore[misc]


def _replacement(kind: type, target: str) -> tuple[_New | None, tuple[str, str] | None]:
    """Return the class that takes the place of `kind` on `target`, or None; and (why, remedy) if it should have one."""
    if _made.intersection(kind.__mro__):
        return None, None
    return _derived(kind, target)


@cache
def _derived(kind: type, target: str) -> tuple[_New | None, tuple[str, str] | None]:
    for rule in leaks.RULES:
        original = leaks.find(rule.original)
        if target not in rule.targets or original is None or not issubclass(kind, original):
            continue
        own = kind.__call__ is not original.__call__
        mixin = None if own else rule.mixin(original)
        if mixin is not None:
            new = mixin if kind is original and issubclass(mixin, original) else type(kind.__name__, (mixin, kind), {})
            _made.add(new)
            return _New(new, rule.now if kind is original else f"{rule.now}, {kind.__qualname__} kept", rule.why), None
        if own and rule.original in leaks.NORMS and not leaks.asks_super(kind):
            break  # what is left to leak is what its own code calls
        said = (
            f"derived from {rule.original}, with a __call__ of its own" if own else "another version than mlxdet knows"
        )
        return None, (f"{said}; {rule.why}", rule.remedy)
    try:
        code = leaks.without_fast(kind, target)
    except LookupError as error:
        return None, (f"it calls mx.fast.{error} where it cannot be replaced", "call the one of mlxdet.nn.fast there")
    if code is None:
        return None, None
    new, names = code
    _made.add(new)
    calls = ", ".join(f"mx.fast.{n}" for n in names)
    return _New(new, f"{calls} from plain operations", leaks.FAST[target][names[0]][1]), None


def _here() -> str:
    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _modules(model: mlx.nn.Module) -> list[tuple[tuple[str, ...], mlx.nn.Module]]:
    """Return every module once, with all its paths, in the order in which the model names them."""
    found: dict[int, tuple[list[str], mlx.nn.Module]] = {}
    for path, module in model.named_modules():
        found.setdefault(id(module), ([], module))[0].append(path)
    return sorted(((tuple(sorted(paths)), module) for paths, module in found.values()), key=lambda row: row[0])


def _name(kind: type) -> str:
    """Return the name of a class, that of mlx.nn's as users write it."""
    return f"{'mlx.nn' if kind.__module__.startswith('mlx.nn.') else kind.__module__}.{kind.__qualname__}"


def _settings(target: str) -> list[str]:
    """Return a line for every setting that MLX reads once and that the environment does not hold as it should."""
    table = {"metal": metal_pins, "cuda": cuda_pins, "cpu": lambda _: {}}[target]("deterministic")
    when = "Set it before Python starts, or call mlxdet.backends.activate() before MLX is imported"
    return [
        f"{name} is {os.environ.get(name, 'not set')}, not {'unset' if value is None else value}: {reason}. {when}"
        for name, (value, reason) in table.items()
        if os.environ.get(name) != value
    ]
