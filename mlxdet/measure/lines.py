"""JSONL files read exactly: one record at a time, numbers as the values of their text, every bad line by its place.

Numbers are the exact values of their text: 1.0 and 1.00 are equal, integers of any length are exact, 0.0 and -0.0
differ, NaN equals NaN (the tokens NaN, Infinity and -Infinity are read as well). Everything else (strings, lists,
objects) is equal when it is the same JSON value; the order of an object's names does not matter.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Context, Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mlxdet.errors import UsageError
from mlxdet.formats.source import bare, quote
from mlxdet.formats.tensor import FormatError

LONGEST = 64 << 20  # bytes of one line; more is no log
DEEPEST = 100  # lists and objects within one another
_EXACT = Context(prec=40, Emax=10**17, Emin=-(10**17), traps=[])
_HEX = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-][0-9]+")  # what float.hex writes


class Number(str):
    """A number of a JSON text, by its spelling."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has the name {quote(next(n for n in names if names.count(n) > 1))} twice")
    return table


def _float(text: str) -> Number:
    if len(text) > 18:  # an exponent beyond Decimal has that many digits
        try:
            Decimal(text)
        except InvalidOperation:
            raise ValueError(f"holds {quote(text)}, a number beyond all measure") from None
    return Number(text)


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=Number, parse_constant=Number, object_pairs_hook=_object)


@lru_cache(4)  # two equal lines, one of each file, are parsed once
def _decode(raw: bytes) -> dict[str, Any]:
    """Return the object of one line. Raises ValueError saying what is wrong with it."""
    try:
        record = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and _depth(record) > DEEPEST:
        raise ValueError("is nested too deeply")
    return record


def _depth(value: dict[str, Any]) -> int:
    level: list[Any] = [value]
    depth = 0
    while level:
        inner = [v for x in level for v in (x.values() if isinstance(x, dict) else x)]
        level, depth = [v for v in inner if isinstance(v, dict | list)], depth + 1
    return depth


class Record(NamedTuple):
    """One line: its place in the order of the key (comparable), its number in the file, its text and its fields."""

    key: tuple[Any, ...]
    line: int
    raw: bytes
    fields: dict[str, Any]


class Records:
    """The records of a JSONL file, one at a time. Blank lines are passed over, a byte order mark is dropped.

    A last line without an end that is no whole record was cut off by a crash: it is kept in `torn` as (line number,
    bytes) and is no record. Any other line that is no JSON object is refused, by file and line. `key` names the fields
    that identify a record, None: its number among the records. `absent` gives fields a value where a record lacks them.
    """

    def __init__(self, path: Path, absent: Mapping[str, Any] | None = None):
        self.path, self.absent = path, absent or {}
        self.key: Sequence[str] | None = None
        self.torn: tuple[int, bytes] | None = None
        self.count = 0
        self.first: str | None = None  # the key of the first record, as people read it
        self.last: str | None = None
        self.last_key: tuple[Any, ...] = ()
        self._lines = self._read()
        self._ahead = next(self._lines, None)

    def has(self, name: str) -> bool:
        """Return whether the first record has the field `name`."""
        return self._ahead is not None and name in self._ahead[2]

    def _read(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        try:
            with self.path.open("rb") as file:
                for number, raw in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                    if number == 1:
                        raw = raw.removeprefix(b"\xef\xbb\xbf")
                    if not raw.strip():
                        continue
                    if len(raw) == LONGEST:
                        raise FormatError(f"{self.path}:{number}: is longer than {LONGEST >> 20} MB; not a JSONL file")
                    try:
                        record = _decode(raw)
                    except ValueError as error:
                        if not raw.endswith(b"\n"):
                            self.torn = (number, raw)
                            return
                        raise FormatError(f"{self.path}:{number}: {error}") from None
                    yield number, raw, {**self.absent, **record} if self.absent else record
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})") from None

    def __iter__(self) -> Iterator[Record]:
        before: Record | None = None
        for line, raw, fields in chain([self._ahead] if self._ahead else [], self._lines):
            self.count += 1
            record = Record(self._key(line, fields), line, raw, fields)
            if before is not None and record.key <= before.key:
                was, now = self.spell(before), self.spell(record)
                what = f"{now} occurs twice" if record.key == before.key else f"{now} comes after {was}"
                raise FormatError(
                    f"{self.path}:{line}: {what} (line {before.line}). The key must rise from record to record: sort "
                    f"the file, name more fields with --key, or take records by their position with --by-position"
                )
            self.last = self.spell(record)
            self.first = self.first or self.last
            self.last_key = record.key
            before = record
            yield record

    def _key(self, line: int, fields: dict[str, Any]) -> tuple[Any, ...]:
        if self.key is None:
            return (self.count,)
        key: list[Any] = []
        for name in self.key:
            value = fields.get(name)
            if type(value) is Number and value[-1] not in "Ny":
                key.append((0, Decimal(value)))
            elif type(value) is str:
                key.append((1, value))
            else:
                what = f"is {quote(spell(value))}, not a number or a string" if name in fields else "is missing"
                raise FormatError(f"{self.path}:{line}: the key field {quote(name)} {what}")
        return tuple(key)

    def spell(self, record: Record) -> str:
        """Return the key of a record as people read it: "step 12", "step 12, rank 0", "record 7"."""
        if self.key is None:
            return f"record {record.key[0]}"
        said = {name: record.fields[name] for name in self.key}
        told = {n: v for n, v in said.items() if n not in self.absent or not same(v, self.absent[n])}
        return ", ".join(f"{name} {bare(value)}" for name, value in (told or said).items())


def spell(value: Any) -> str:
    """Return a value as JSON, its numbers as the file has them."""
    if type(value) is Number:
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {spell(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal: numbers by their exact value and sign, the rest as JSON values."""
    if type(a) is not type(b):
        return False
    if type(a) is Number:
        if a == b:
            return True
        if a[-1] in "Ny" or b[-1] in "Ny":  # NaN, Infinity
            return False
        x, y = Decimal(a), Decimal(b)
        return x == y and x.is_signed() == y.is_signed()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return a == b


def _value(value: Any) -> Decimal | None:
    """Return what a number, or a float spelled by float.hex, is worth; None for all else and what is not finite."""
    if type(value) is Number:
        return None if value[-1] in "Ny" else Decimal(value)
    if type(value) is str and len(value) < 40 and _HEX.fullmatch(value):
        try:
            return Decimal(float.fromhex(value))
        except OverflowError:
            return None
    return None


def distance(a: Any, b: Any) -> float | None:
    """Return |a - b| of two numbers, None where there is none: not numbers, or not finite."""
    x, y = _value(a), _value(b)
    return None if x is None or y is None else _finite(_EXACT.abs(_EXACT.subtract(x, y)))


def relative(a: Any, b: Any) -> float | None:
    """Return |a - b| / |a| of two numbers, None where there is none, a = 0 included."""
    x, y = _value(a), _value(b)
    return None if not x or y is None else _finite(_EXACT.abs(_EXACT.divide(_EXACT.subtract(x, y), x)))


def _finite(value: Decimal) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
