"""The checks that every reader shares: sizes that follow from shapes, ranges that tile the data section, strict JSON.

A header is a claim. It is accepted only if the ranges it names fill the data section exactly, from its first byte to
the last, with nothing between them but zero padding of the one length that the format's alignment asks for.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from mlxdet.formats.source import Source, quote

MAX_BYTES = 1 << 62  # far above any file; keeps every later sum inside 64 bits
MAX_DIMS = 64
MAX_HEADER = 100_000_000  # the limit of the safetensors package
MAX_EXPANDED = 4 << 30  # the most bytes that a few bytes of file may stand for: a packed member, a repeated element


class Span(NamedTuple):
    """The bytes [start, stop) that a header claims for a tensor, relative to the data section."""

    start: int
    stop: int
    name: str


def is_count(value: object) -> bool:
    """Return whether `value` is an integer that can be a size or an offset (bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def check_shape(source: Source, name: str, shape: object) -> tuple[int, ...]:
    """Return `shape` as a tuple if it is a list of sizes whose product, even without its zeros, stays in range."""
    if not isinstance(shape, list | tuple) or not all(is_count(size) for size in shape):
        raise source.error("shape is not a list of sizes", name)
    if len(shape) > MAX_DIMS:
        raise source.error(f"shape has {len(shape)} dimensions, more than {MAX_DIMS}", name)
    product = 1
    for size in shape:
        product *= max(size, 1)
        if product > MAX_BYTES:
            raise source.error("the product of its shape overflows", name)
    return tuple(shape)


def count(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a checked shape."""
    product = 1
    for size in shape:
        product *= size
    return product


def byte_size(source: Source, name: str, shape: tuple[int, ...], bits: int) -> int:
    """Return the bytes of a tensor of `bits` per element; refuse a size that is not whole bytes."""
    total = count(shape) * bits
    if total % 8:
        raise source.error(f"{count(shape)} elements of {bits} bits are not a whole number of bytes", name)
    return total // 8


def check_tiling(
    source: Source, spans: Iterable[Span], base: int, stop: int, align: int = 1, tail: bool = False
) -> None:
    """Refuse unless `spans`, relative to `base`, tile the bytes from `base` to `stop` of the file.

    With `align` above 1 each span starts at the next multiple of it after its predecessor, and the bytes skipped are
    zero. With `tail` the last span may be followed by such padding too.
    """
    position, previous = 0, None
    for span in sorted(spans):
        expected = -(-position // align) * align
        if span.start < position:
            raise source.error(f"starts at {span.start}, inside tensor {quote(previous)}: they overlap", span.name)
        if span.start != expected:
            raise source.error(f"leaves a gap: starts at {span.start}, not at {expected}", span.name)
        if base + span.stop > stop:
            raise source.error(f"needs {base + span.stop} bytes of file, which has {stop}: truncated?", span.name)
        if not source.is_zero(base + position, base + expected):
            raise source.error(f"the padding before it, at byte {base + position}, is not zero", span.name)
        position, previous = span.stop, span.name
    end, length = base + position, stop
    padded = base - (-position // align) * align
    if tail and length == padded and source.is_zero(end, length):
        return
    if length < end:
        raise source.error(f"has {length} bytes, but the header needs {end}: truncated")
    if length > end:
        raise source.error(f"has {length - end} bytes after its last tensor that its header does not explain")


def parse_json(source: Source, start: int, stop: int, what: str) -> Any:
    """Return the JSON value in the bytes [start, stop). Strict: UTF-8, no duplicate keys, no NaN, no deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise source.error(f"{what} has the name {quote(twice)} twice")
        return table

    def constant(text: str) -> Any:
        raise source.error(f"{what} holds {text}, which is not JSON")

    if stop - start > MAX_HEADER:
        raise source.error(f"{what} is {stop - start} bytes long, more than {MAX_HEADER}")
    try:
        text = str(source.view[start:stop], "utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as problem:
        raise source.error(f"{what} is not UTF-8 (byte {start + problem.start})") from None
    except json.JSONDecodeError as problem:
        raise source.error(f"{what} is not JSON: {problem.msg} at character {problem.pos}") from None
    except RecursionError:
        raise source.error(f"{what} is nested too deeply") from None
    except ValueError as problem:
        if type(problem) is not ValueError:
            raise
        raise source.error(f"{what} holds a number that is too long") from None
