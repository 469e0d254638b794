"""The arrays that a function reads and writes besides its arguments: closures, globals, models, optimizers.

A training step usually returns its loss alone and leaves new weights in the model. To trace all of it, the audit must
find those arrays, hand in placeholders for them, take what the function leaves there as outputs, and put everything
back as it was.
"""

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

_OPAQUE = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, type)
_LIBRARIES = {"mlx", "numpy", "mlxdet", "rich", "click"} | set(sys.stdlib_module_names)


def map_arrays(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of nested dictionaries, lists, tuples and dataclasses with `change(path, leaf)` for each leaf."""
    if type(tree) is dict:
        return {k: map_arrays(v, change, join(path, str(k))) for k, v in tree.items()}
    if type(tree) is list:
        return [map_arrays(v, change, f"{path}[{i}]") for i, v in enumerate(tree)]
    if isinstance(tree, tuple):
        items = [map_arrays(v, change, f"{path}[{i}]") for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if is_dataclass(tree) and not isinstance(tree, type) and all(f.init for f in fields(tree)):
        return replace(
            tree, **{f.name: map_arrays(getattr(tree, f.name), change, join(path, f.name)) for f in fields(tree)}
        )
    return change(path, tree)


def join(path: str, name: str) -> str:
    """Return the dotted path of `name` under `path`."""
    return f"{path}.{name}" if path else name


@dataclass
class Slot:
    """One place that holds an array: an entry of a dictionary or list, or the variable of a closure."""

    path: str
    holder: Any
    key: Any

    def set(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            dict.__setitem__(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


class _Attributes:
    """The attributes of an object with slots, as a mapping."""

    def __init__(self, item: Any):
        self.item = item

    def __getitem__(self, name: str) -> Any:
        return getattr(self.item, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.item, name, value)


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if not n.startswith("__"))


@dataclass
class Reachable:
    """What can be reached from a function: its array slots, and how to put every container back."""

    slots: list[tuple[Slot, Any]] = field(default_factory=list)  # with the array in it; one place can be met twice
    restore: list[Callable[[], None]] = field(default_factory=list)
    fixed: dict[int, tuple[str, Any]] = field(default_factory=dict)  # arrays in tuples: seen, but not replaceable
    seen: set[int] = field(default_factory=set)  # ids of all that was walked through


def reachable(roots: dict[str, Any]) -> Reachable:
    """Walk from the named roots. Modules, classes and libraries are not entered."""
    found = Reachable()
    # (path, object, slot or None), last in first out: no recursion, as models can be deep.
    pending: list[tuple[str, Any, Slot | None]] = [(path, root, None) for path, root in reversed(roots.items())]
    while pending:
        path, item, slot = pending.pop()
        if isinstance(item, mx.array):
            if slot is not None:
                found.slots.append((slot, item))
            else:
                found.fixed[id(item)] = (path, item)
            continue
        if isinstance(item, _OPAQUE) or id(item) in found.seen:
            continue
        found.seen.add(id(item))
        pending.extend(reversed(list(_children(path, item, found))))
    return found


def _refill(item: dict[Any, Any], saved: dict[Any, Any]) -> None:
    dict.clear(item)
    dict.update(item, saved)


def _children(path: str, item: Any, found: Reachable) -> Iterator[tuple[str, Any, Slot | None]]:
    if isinstance(item, dict):
        saved = dict(item)
        found.restore.append(partial(_refill, item, saved))
        for key, value in saved.items():
            where = join(path, str(key))
            yield where, value, Slot(where, item, key)
    if isinstance(item, list):
        kept = list(item)
        found.restore.append(lambda: item.__setitem__(slice(None), kept))
        for i, value in enumerate(kept):
            yield f"{path}[{i}]", value, Slot(f"{path}[{i}]", item, i)
    elif isinstance(item, tuple | set | frozenset | deque):
        for i, value in enumerate(item):
            yield f"{path}[{i}]", value, None
    elif isinstance(item, partial):
        yield path, item.func, None
        yield path, item.args, None
        yield path, item.keywords, None
    elif isinstance(item, types.MethodType):
        yield path, item.__self__, None
        yield path, item.__func__, None
    elif isinstance(item, types.FunctionType):
        yield from _of_function(path, item, found)
    elif type(item).__module__ == "mlx.core":  # compiled, differentiated and custom functions hold what they wrap
        if type(item).__name__ in ("_gc_func", "custom_function"):
            for held in gc.get_referents(item):
                yield path, held, None
    elif _is_plain_object(item):
        if hasattr(item, "__dict__"):
            yield path, vars(item), None
        for cls in type(item).__mro__:
            for name in _slots(cls):
                if hasattr(item, name):
                    value = getattr(item, name)
                    found.restore.append(partial(object.__setattr__, item, name, value))
                    yield join(path, name), value, Slot(join(path, name), _Attributes(item), name)
            if not _is_library(cls.__module__):
                yield from ((path, f, None) for f in vars(cls).values() if isinstance(f, types.FunctionType))


def _of_function(path: str, f: types.FunctionType, found: Reachable) -> Iterator[tuple[str, Any, Slot | None]]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        found.restore.append(partial(setattr, cell, "cell_contents", value))
        yield name, value, Slot(name, cell, None)
    yield path, f.__defaults__, None
    yield path, f.__kwdefaults__, None
    if _is_library(f.__module__):
        return
    names = _names(f.__code__)
    for name in sorted(names & f.__globals__.keys()):
        value = f.__globals__[name]
        if isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                yield from ((join(name, n), vars(value)[n], None) for n in sorted(names & vars(value).keys()))
            continue
        if isinstance(value, mx.array):
            found.restore.append(partial(f.__globals__.__setitem__, name, value))
        yield name, value, Slot(name, f.__globals__, name)


def _names(code: types.CodeType) -> set[str]:
    """Return the global and attribute names that `code` and the functions defined in it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES


def _is_plain_object(item: Any) -> bool:
    if not hasattr(item, "__dict__") and not any(_slots(cls) for cls in type(item).__mro__):
        return False
    module = type(item).__module__
    # Objects of MLX's Python side (layers, optimizers) hold arrays; those of other libraries do not.
    return module.startswith(("mlx.nn", "mlx.optimizers", "mlxdet.")) or not _is_library(module)
