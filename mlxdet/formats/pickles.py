"""Pickles read as data. Nothing that a pickle names is imported, called or built.

A pickle is a program for a small stack machine. This is that machine without its dangerous half: where Python's would
import a global it makes a `Global`, a name; where it would call or instantiate one it makes a `Call`, a record of what
was to be called with what. Whoever reads the result decides which calls it knows. Numbers, strings, lists, tuples and
dicts become what they are, and everything else a record, so a payload such as os.system is a string in the result and
nothing more.

Protocols 1 to 5, without the text opcodes of protocol 0, the extension registry and out-of-band buffers. A name set
twice in one dict is refused: the second would hide the first.

Format: the comments of pickletools.py in the standard library.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import FormatError

MAX_BYTES = 256 << 20
MAX_OPCODES = 6_000_000  # a tensor takes about 40; bounds the memory of a pickle made of empty dicts


class Global(NamedTuple):
    """A class or function by name, not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """What a pickle wanted made: `function` called with `args`, then given `state`, `items` and `appended` values."""

    __slots__ = ("appended", "args", "function", "items", "state")

    def __init__(self, function: object, args: tuple, appended: list | None = None):
        self.function, self.args, self.state = function, args, None
        self.items: list[tuple[object, object]] = []
        self.appended: list[object] = appended or []


class Persistent:
    """A reference to something outside the pickle."""

    __slots__ = ("id",)

    def __init__(self, identity: object):
        self.id = identity


class Pickled(NamedTuple):
    """The value of a pickle, the outside references it makes in order, and where it ends."""

    value: object
    persistent: list[Persistent]
    stop: int


def load(source: Source, data: memoryview, start: int, what: str) -> Pickled:
    """Return what the pickle at `start` of `data` holds. Raises FormatError, calling the pickle `what`."""
    machine = _Machine(source, data, start, what)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError):
        raise machine.error("is truncated or damaged") from None


def _check_key(key: object) -> bool:
    """Return whether `key` may be a dict key: only what hashes at once, no deep tuples, no numbers made to collide."""
    if isinstance(key, int):
        return -(1 << 63) <= key < 1 << 64
    if isinstance(key, tuple):
        return all(
            isinstance(part, str | bytes | bool | None) or (isinstance(part, int) and _check_key(part)) for part in key
        )
    return isinstance(key, str | bytes | float | Call | None)


class _Machine:
    def __init__(self, source: Source, data: memoryview, start: int, what: str):
        self.source, self.data, self.position, self.what = source, data[: start + MAX_BYTES], start, what
        self.limited = len(data) > len(self.data)
        self.stack: list = []
        self.below: list[list] = []
        self.memo: dict[int, object] = {}
        self.persistent: list[Persistent] = []

    def error(self, message: str) -> FormatError:
        return self.source.error(f"{self.what} {message} (at byte {self.position})")

    def run(self) -> Pickled:
        for _ in range(MAX_OPCODES):
            opcode = self.data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                if len(self.stack) != 1 or self.below:
                    raise self.error("does not end with exactly one value")
                return Pickled(self.stack[0], self.persistent, self.position)
            step = _OPCODES.get(opcode)
            if step is None:
                raise self.error(f"uses the opcode {bytes([opcode])!r}, which is not supported")
            step(self)
        raise self.error(f"takes more than {MAX_OPCODES} steps")

    # Reading from the pickle itself.

    def take(self, length: int) -> bytes:
        start, stop = self.position, self.position + length
        if stop > len(self.data):
            raise self.error(f"is longer than {MAX_BYTES} bytes" if self.limited else "is truncated")
        self.position = stop
        return bytes(self.data[start:stop])

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        for stop in range(self.position, min(len(self.data), self.position + 1000)):
            if self.data[stop] == 0x0A:
                return self.take(stop + 1 - self.position)[:-1].decode()
        raise self.error("has a name without an end")

    # The stack.

    def push(self, value: object) -> None:
        self.stack.append(value)

    def marked(self) -> list:
        """Return what lies above the last mark, and take both off the stack."""
        if not self.below:
            raise self.error("uses a mark that it never set")
        values, self.stack = self.stack, self.below.pop()
        return values

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise self.error(f"refers to value {index}, which it never made")
        self.push(self.memo[index])

    # Containers.

    def set_items(self, pairs: list) -> None:
        target = self.stack[-1]
        if len(pairs) % 2 or not isinstance(target, dict | Call):
            raise self.error("sets items of something that has none")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(target, Call):
                target.items.append((key, value))
                continue
            if not _check_key(key):
                raise self.error("has a dict key of a kind that is not supported")
            if key in target:
                raise self.error(f"sets the key {quote(key)} twice in one dict")
            target[key] = value

    def make_dict(self) -> None:
        pairs = self.marked()
        self.push({})
        self.set_items(pairs)

    def append(self, values: list) -> None:
        target = self.stack[-1]
        if isinstance(target, Call):
            target.appended.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise self.error("appends to something that is no list")

    def make_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise IndexError
        values = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.push(values)

    # What Python would import, call or instantiate.

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.error("names a global with something that is no text")
        self.push(Global(module, name))

    def call(self, extra: int = 0) -> None:
        keywords = tuple(self.stack.pop() for _ in range(extra))
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            raise self.error("calls something with arguments that are no tuple")
        self.push(Call(function, args + keywords))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Call) or target.state is not None:
            raise self.error("sets the state of something that has none, or has it already")
        target.state = state

    def persist(self) -> None:
        reference = Persistent(self.stack.pop())
        self.persistent.append(reference)
        self.push(reference)

    def obj(self) -> None:
        values = self.marked()
        self.push(Call(values[0], tuple(values[1:])))

    def inst(self) -> None:
        function = Global(self.line(), self.line())
        self.push(Call(function, tuple(self.marked())))

    def proto(self) -> None:
        if self.number(1) > 5:
            raise self.error("is of a protocol above 5")


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.push(value)


def _integer(width: int, signed: bool = False) -> Callable[[_Machine], None]:
    return lambda m: m.push(int.from_bytes(m.take(width), "little", signed=signed))


def _long(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(int.from_bytes(m.take(m.number(width)), "little", signed=True))


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(width)))


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(width)).decode("utf-8", "surrogatepass"))


def _old_text(width: int) -> Callable[[_Machine], None]:
    """Read the 8-bit strings of Python 2, which were text or bytes: UTF-8 if they are, else byte for byte."""

    def step(m: _Machine) -> None:
        raw = m.take(m.number(width))
        try:
            m.push(raw.decode())
        except UnicodeDecodeError:
            m.push(raw.decode("latin-1"))

    return step


_OPCODES: dict[int, Callable[[_Machine], object]] = {
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.marked,
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _integer(4, signed=True),
    ord("K"): _integer(1),
    ord("M"): _integer(2),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("T"): _old_text(4),
    ord("U"): _old_text(1),
    ord("X"): _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x8E: _bytes(8),
    0x96: _bytes(8),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.marked()),
    ord("l"): lambda m: m.push(m.marked()),
    ord(")"): _constant(()),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    0x85: lambda m: m.make_tuple(1),
    0x86: lambda m: m.make_tuple(2),
    0x87: lambda m: m.make_tuple(3),
    ord("}"): lambda m: m.push({}),
    ord("d"): _Machine.make_dict,
    ord("s"): lambda m: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.marked()),
    0x8F: lambda m: m.push(Call(Global("builtins", "set"), ())),
    0x90: lambda m: m.append(m.marked()),
    0x91: lambda m: m.push(Call(Global("builtins", "frozenset"), (), m.marked())),
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("c"): lambda m: m.push(Global(m.line(), m.line())),
    0x93: _Machine.stack_global,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    0x92: lambda m: m.call(extra=1),
    ord("b"): _Machine.build,
    ord("o"): _Machine.obj,
    ord("i"): _Machine.inst,
    ord("Q"): _Machine.persist,
    0x80: _Machine.proto,
    0x95: lambda m: m.take(8),
}
