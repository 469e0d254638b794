"""A user's function for the audit: MODULE:FUNCTION, called without arguments, returns (fn, args)."""

import importlib
import sys
from pathlib import Path
from typing import Any

from mlxdet.errors import UsageError


def load(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return (fn, args) of "module:function" or "path/to/file.py:function".

    Raises UsageError if there is no such thing, if it fails, or if it returns something else.
    """
    module_name, colon, function = name.rpartition(":")
    if not colon or not module_name or not function:
        raise UsageError(f"{name!r}: write MODULE:FUNCTION, as in my_training:audited")
    if module_name.endswith(".py"):
        sys.path.insert(0, str(Path(module_name).resolve().parent))
        module_name = Path(module_name).stem
    else:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
        make = getattr(module, function)
    except AttributeError:
        raise UsageError(f"{name}: module {module_name} has no {function}") from None
    except Exception as error:
        raise UsageError(f"{name}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    try:
        made = make()
    except Exception as error:
        raise UsageError(f"{name}() failed ({type(error).__name__}: {error}); it must return (fn, args)") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
        raise UsageError(f"{name}() must return (fn, args), the function to trace and a tuple of its arguments")
    return made[0], tuple(made[1])
