"""From the records of a PyTorch pickle to tensors: what both of PyTorch's file formats share.

A tensor is a strided window on a storage, and the storage lies in the file outside the pickle. Only the handful of
functions that PyTorch itself writes for plain tensors and parameters are understood. Whatever else holds tensors
(sparse, quantised, nested, wrapped by an unknown function) is reported as unread, and everything without any is
described in the metadata.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import check_shape, count, is_count
from mlxdet.formats.pickles import Call, Global, Persistent
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import FormatError
from mlxdet.formats.torch_storages import DTYPES, Window, as_tensor, storage_of

MAX_VALUES = 4_000_000  # values visited; a pickle can refer to one list from many places, and grow without end that way
MAX_DEPTH = 100

_TENSORS = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
_PARAMETERS = {"_rebuild_parameter": 3, "_rebuild_parameter_with_state": 4}
_DICTS = {("collections", "OrderedDict"), ("collections", "defaultdict")}
_LISTS = {("builtins", "set"), ("builtins", "frozenset"), ("__builtin__", "set"), ("__builtin__", "frozenset")}


@dataclass
class Found:
    """What a walk over the value of a pickle found, by path: keys and indices joined with dots."""

    source: Source
    windows: dict[str, Window] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    visited: int = 0
    parents: set[int] = field(default_factory=set)

    def walk(self, value: object, path: str, depth: int = 0) -> None:
        """Sort `value` and all that it holds into windows, values and unread."""
        self.count(1)
        if depth > MAX_DEPTH or id(value) in self.parents:
            raise self.source.error(f"{quote(path)} holds itself, or is nested more than {MAX_DEPTH} deep")
        if isinstance(value, Persistent):
            self.keep(path, self.whole_storage(value))
        elif isinstance(value, Call) and self.is_tensor(value):
            self.keep(path, self.window(value, path))
        elif not self.is_container(value):
            self.add(self.values, path, self.plain(value))
        else:
            self.parents.add(id(value))
            for key, part in self.parts(value, path):
                self.walk(part, f"{path}.{key}" if path else key, depth + 1)
            self.parents.discard(id(value))

    def is_container(self, value: object) -> bool:
        """Return whether to look into `value`; what is not, and holds no tensors, is one value of the metadata."""
        if isinstance(value, dict):
            return bool(value) and (all(_simple(key) for key in value) or self.holds_data(value))
        if isinstance(value, list | tuple) and not isinstance(value, Global):
            return not all(map(_simple, value))
        return isinstance(value, Call) and self.holds_data(value)

    def count(self, number: int) -> None:
        self.visited += number
        if self.visited > MAX_VALUES:
            raise self.source.error(f"holds more than {MAX_VALUES} values")

    def add(self, table: dict, path: str, value: object) -> None:
        name = path or "tensor"
        if name in self.windows or name in self.values or name in self.unread:
            raise self.source.error("is the name of two different entries", name)
        table[name] = value

    def keep(self, path: str, window: Window | None) -> None:
        if window is None:
            self.add(self.unread, path, "is a kind of tensor that is not plain")
        else:
            self.add(self.windows, path, window)

    def parts(self, value: object, path: str) -> list[tuple[str, object]]:
        """Return what a container holds, with the piece of path that leads there."""
        if isinstance(value, dict):
            return [(self.key(key, path), part) for key, part in value.items()]
        if isinstance(value, list | tuple):
            return [(str(index), part) for index, part in enumerate(value)]
        assert isinstance(value, Call)
        parts = [(self.key(key, path), part) for key, part in value.items]
        parts += [(str(index), part) for index, part in enumerate(value.appended)]
        if isinstance(value.function, Global) and value.function in _DICTS | _LISTS:
            for argument in value.args:
                parts += self.pairs(argument, path)
            if not isinstance(value.state, dict) or value.state.keys() - {"_metadata"}:
                parts += self.attributes(value.state, path)
            return parts
        maker = _shorten(self.plain_text(value.function, 0))
        self.classes.setdefault(maker, path)
        if any(self.holds_data(argument) for argument in value.args):
            self.add(self.unread, path, f"is made by {maker}, which is not known")
        return parts + self.attributes(value.state, path)

    def pairs(self, argument: object, path: str) -> list[tuple[str, object]]:
        """Return the items of an argument of OrderedDict or set: a list of pairs (Python 2), or of values."""
        if not isinstance(argument, list | tuple):
            return []
        if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in argument):
            return [(self.key(key, path), part) for key, part in argument]
        return [(str(index), part) for index, part in enumerate(argument)]

    def attributes(self, state: object, path: str) -> list[tuple[str, object]]:
        """Return what the state of an object holds: its attributes, as a dict, or a pair of dicts with its slots."""
        if isinstance(state, dict):
            return [(self.key(key, path), part) for key, part in state.items()]
        if isinstance(state, tuple) and all(isinstance(part, dict | None) for part in state):
            return [pair for part in state if part for pair in self.attributes(part, path)]
        return [("state", state)] if self.holds_data(state) else []

    def key(self, key: object, path: str) -> str:
        if _simple(key):
            return str(key)
        if isinstance(key, bytes | tuple | Global):
            return self.plain_text(key, 0)
        raise self.source.error(f"{quote(path)} has a key of a kind that is not supported")

    def holds_data(self, value: object) -> bool:
        """Return whether anything below `value` refers to a storage."""
        todo, seen = [value], set()
        while todo:
            item = todo.pop()
            if isinstance(item, Persistent):
                return True
            if isinstance(item, dict | list | tuple | Call) and id(item) not in seen:
                seen.add(id(item))
                self.count(1)
                if isinstance(item, dict):
                    todo.extend(item.values())
                elif isinstance(item, Call):
                    todo += [item.function, *item.args, item.state, *item.appended, *(part for _, part in item.items)]
                elif not isinstance(item, Global):
                    todo.extend(item)
        return False

    # Tensors.

    def is_tensor(self, call: Call) -> bool:
        function = call.function
        if not isinstance(function, Global) or function.module not in ("torch._utils", "torch._tensor"):
            return False
        return function.name.startswith("_rebuild_")

    def whole_storage(self, reference: Persistent) -> Window | None:
        storage, offset = storage_of(self.source, reference)
        if offset > storage.size:
            raise self.source.error(f"storage {quote(storage.key)}: has a view that starts beyond its end")
        return Window(storage.key, storage.dtype, storage.width, offset, (storage.size - offset,), (1,))

    def window(self, call: Call, path: str) -> Window | None:
        """Return the window that a call to one of PyTorch's functions describes; None if that is no plain tensor."""
        for _ in range(8):
            assert isinstance(call.function, Global)
            name, args = call.function.name, call.args
            if name in _TENSORS and len(args) >= _TENSORS[name]:
                return self.plain_tensor(name, args, path)
            inner: object = None
            if name in _PARAMETERS and len(args) >= _PARAMETERS[name]:
                inner = args[0]
            elif name == "_rebuild_from_type_v2" and len(args) == 4 and isinstance(args[2], tuple):
                inner = Call(args[0], args[2])
            if not isinstance(inner, Call) or not self.is_tensor(inner):
                return None
            call = inner
        return None

    def plain_tensor(self, name: str, args: tuple, path: str) -> Window | None:
        reference, offset, size, stride = args[:4]
        if isinstance(size, Call) and size.function == ("torch", "Size") and len(size.args) == 1:
            size = size.args[0]
        if not isinstance(reference, Persistent):
            return None
        more = args[_TENSORS[name] :]
        if any(more):  # marks a conjugated or negated view: the numbers are not the bytes
            return None
        storage, start = storage_of(self.source, reference)
        dtype, width, total = storage.dtype, storage.width, storage.size
        if name == "_rebuild_tensor_v3":
            kind = args[6]
            if not isinstance(kind, Global) or kind.module != "torch" or kind.name not in DTYPES:
                return None
            dtype, width = DTYPES[kind.name]
            total = storage.nbytes // width
        shape = check_shape(self.source, path, size)
        if not isinstance(stride, tuple) or len(stride) != len(shape) or not all(is_count(step) for step in stride):
            raise self.source.error("has strides that do not go with its shape", path)
        if not isinstance(offset, int) or not is_count(offset):
            raise self.source.error("has no proper offset into its storage", path)
        offset += start * storage.width // width
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if count(shape) and last >= total:
            raise self.source.error(f"reaches element {last} of storage {quote(storage.key)}, which has {total}", path)
        return Window(storage.key, dtype, width, offset, shape, stride)

    # Everything else.

    def plain(self, value: object) -> object:
        """Return a value without tensors as JSON can hold it."""
        if _simple(value):
            return value
        if isinstance(value, list | tuple) and not isinstance(value, Global):
            self.count(len(value))
            return list(value)
        if isinstance(value, dict) and not value:
            return {}
        return _shorten(self.plain_text(value, 0))

    def plain_text(self, value: object, depth: int) -> str:
        """Return an unambiguous text for any value: equal values have equal texts."""
        self.count(1)
        if depth > MAX_DEPTH:
            return "..."

        def inner(parts: Iterable) -> str:
            return ", ".join(self.plain_text(part, depth + 1) for part in parts)

        if isinstance(value, Global):
            return str(value) if str(value).isprintable() else repr(str(value))
        if isinstance(value, int) and not isinstance(value, bool):
            return hex(value) if value.bit_length() > 64 else str(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{inner([key])}: {inner([part])}" for key, part in value.items()) + "}"
        if isinstance(value, list | tuple):
            return ("[%s]" if isinstance(value, list) else "(%s)") % inner(value)
        if isinstance(value, Call):
            rest = [value.state, value.items, value.appended]
            return f"{inner([value.function])}({inner([*value.args, *(part for part in rest if part)])})"
        return _shorten(repr(value))


def _simple(value: object) -> bool:
    return isinstance(value, str | float | bool | None) or (isinstance(value, int) and value.bit_length() <= 64)


def _shorten(text: str) -> str:
    if len(text) <= 200:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{text[:120]}... ({len(text)} characters, blake2b {digest})"


def as_checkpoint(
    source: Source, kind: str, found: Found, data: Callable[[str], np.ndarray], big_endian: bool, notes: list[str]
) -> Checkpoint:
    """Return the checkpoint of what was found. `data` gives the bytes of a storage by key, in the file's byte order."""
    tensors = {name: as_tensor(source, name, window, data, big_endian) for name, window in found.windows.items()}
    groups: dict[Window, list[str]] = {}
    for name, window in sorted(found.windows.items()):
        if count(window.shape):
            groups.setdefault(window, []).append(name)
    notes = notes + [f"{quote(name)} {why}: not read" for name, why in found.unread.items()]
    for name, path in sorted(found.classes.items()):
        notes.append(f"an object of class {name} at {quote(path)} is read as its attributes")
    tied = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return Checkpoint(source.path, kind, by_name(tensors), found.values, tuple(notes), tuple(found.unread), tied)


def unknown(source: Source, message: str) -> FormatError:
    """Return the refusal of a file that is not what torch.save writes."""
    return source.error(f"{message}; save a state_dict with torch.save")
