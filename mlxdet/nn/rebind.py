"""Read which functions a module's code reaches, and run that code with others in place of some of them.

A Python function finds what it calls in a dictionary, its globals. A copy of the function with another dictionary runs
the same code on other functions, and so do copies of the functions that it calls in turn; nothing outside them changes.
"""

import dis
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import mlx
import mlx.core as mx


def names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function's code mentions, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def _loaded(code: CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values that code loads from its globals, and from modules there by attribute."""
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = scope.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, (ModuleType, _Instead)):
            value = getattr(value, step.argval, None)
        elif isinstance(step.argval, CodeType):
            yield from _loaded(step.argval, scope)
            continue
        else:
            value = None
        yield value


def _is_ours(function: FunctionType) -> bool:
    return function.__module__.split(".")[0] != "mlx"


def reached(function: FunctionType) -> list[Any]:
    """Return every value that `function` loads, itself or in Python functions that it loads (but for MLX's own)."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [function]
    while todo:
        for value in _loaded((f := todo.pop()).__code__, f.__globals__):
            if value is not None and id(value) not in seen:
                seen[id(value)] = value
                if isinstance(value, FunctionType) and _is_ours(value):
                    todo.append(value)
    return list(seen.values())


def rebind(function: FunctionType, scope: Mapping[str, Any]) -> FunctionType:
    """Return a copy of `function` that finds the names of `scope` there instead of in its own globals."""
    return _copy(function, {**function.__globals__, **scope})


def _copy(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__doc__, copy.__module__ = function.__kwdefaults__, function.__doc__, function.__module__
    return copy


class _Instead:
    """A module that is `whole` but for some attributes."""

    def __init__(self, whole: Any, **attributes: Any):
        vars(self).update(attributes)
        self.__whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__whole, name)


Copies = dict[FunctionType, FunctionType]


def with_fast(function: FunctionType, instead: Mapping[str, Any], copies: Copies | None = None) -> FunctionType:
    """Return a copy of `function` in which `mx.fast.<name>` is instead[name], here and in the functions of its globals.

    MLX is found by whatever name it has there. What is reached in another way (a method of an object, another module's
    attribute, a compiled function) is not: see `reached` of the copy.
    """
    copies = {} if copies is None else copies
    if function in copies:
        return copies[function]
    own = [getattr(mx.fast, name) for name in instead if hasattr(mx.fast, name)]
    scope = dict(function.__globals__)
    copies[function] = copy = _copy(function, scope)
    mine = _Instead(mx.fast, **instead)
    for name in set(names(function.__code__)) & scope.keys():
        value = scope[name]
        if value is mlx:
            scope[name] = _Instead(mlx, core=_Instead(mx, fast=mine))
        elif value is mx:
            scope[name] = _Instead(mx, fast=mine)
        elif value is mx.fast:
            scope[name] = mine
        elif any(value is f for f in own):
            scope[name] = instead[value.__name__]
        elif isinstance(value, FunctionType) and _is_ours(value) and any(r is f for r in reached(value) for f in own):
            scope[name] = with_fast(value, instead, copies)
    return copy
