"""burnpack (.bpk): the records of the Burn framework.

    "NRUB" | version u16 | length of the metadata u32 | metadata, CBOR | padding | data section

Offsets count from the data section. Version 1 is two layouts, and does not say which: Burn 0.19 packs, the data section
starts right after the metadata and tensors follow each other without a gap; from 0.20 on both start at multiples of 256
bytes, counted from the start of the record. So the layout is worked out, from the offsets and from the exact length;
never by solving the start of the data section from the length, which would take any truncation for another start. A
file that fits both layouts is refused.

A file may hold several records one after the other, and a trainer may put a short header of its own before them if that
states their lengths. With several, names get the prefix `record0.`, `record1.`, and so on. Records of optimizers name
their tensors by parameter ids, which differ in every process; they get the module paths that the record's metadata, or
the model in the same file, has for those ids.

Format: crates/burn-pack and crates/burn-store/src/burnpack of tracel-ai/burn, versions 0.19 to 0.22-pre.
"""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from mlxdet.formats import cbor
from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import Span, byte_size, check_shape, check_tiling, is_count
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import FormatError, Tensor

MAGIC = b"NRUB"
ALIGN = 256
HEADER = 10
MAX_METADATA = 100 << 20
MAX_RECORDS = 256
MAX_PREAMBLE = 255  # less than any record of the aligned layout, so that none can be mistaken for a preamble
_BITS = {
    "F64": 64, "F32": 32, "Flex32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "BOOL_U8": 8, "BOOL_U32": 32,
}  # fmt: skip


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    span: Span
    param_id: int | None


@dataclass
class _Record:
    """A record: `choices` are the (data section, end) of each layout that its offsets allow."""

    start: int
    metadata_stop: int
    entries: dict[str, _Entry]
    metadata: dict[str, str]
    scalars: dict[str, object]
    choices: dict[str, tuple[int, int]] = field(default_factory=dict)


def looks_like(source: Source) -> bool:
    """Return whether a record starts at the start of the file, or within the first few bytes of it."""
    return source.find(MAGIC, 0, MAX_PREAMBLE + len(MAGIC)) >= 0


def read(source: Source) -> Checkpoint:
    """Return the tensors of all records in a file. Raises FormatError."""
    start = source.find(MAGIC, 0, MAX_PREAMBLE + len(MAGIC))
    problem: FormatError | None = None
    while start >= 0:
        try:
            chain = _chain(source, start)
            break
        except FormatError as refusal:
            problem = problem or refusal
        # The magic bytes may occur in a preamble by chance; a file that starts with them has none.
        start = source.find(MAGIC, start + 1, MAX_PREAMBLE + len(MAGIC)) if start else -1
    else:
        raise problem or source.error("has no burnpack record")
    for record, layout in chain:
        _check(source, record, layout)
    if start:
        _check_preamble(source, start, [record.choices[layout][1] - record.start for record, layout in chain])
    return _checkpoint(source, chain)


def _chain(source: Source, start: int) -> list[tuple[_Record, str]]:
    """Return the records from `start` to the end of the file, with their layouts, if there is one way to read them."""
    records: dict[int, _Record] = {}
    complete: list[list[tuple[_Record, str]]] = []
    todo: list[tuple[int, list[tuple[_Record, str]]]] = [(start, [])]
    problem: FormatError | None = None
    for _ in range(4 * MAX_RECORDS):
        if not todo:
            break
        position, before = todo.pop()
        try:
            if position not in records:
                records[position] = _parse(source, position)
        except FormatError as refusal:
            problem = refusal
            continue
        record, reached = records[position], False
        for layout, (_, stop) in record.choices.items():
            if stop == source.size:
                complete.append([*before, (record, layout)])
            elif source.view[stop : stop + 4] == MAGIC:
                todo.append((stop, [*before, (record, layout)]))
            else:
                continue
            reached = True
        if not reached:
            ends = " or ".join(str(stop) for _, stop in record.choices.values())
            problem = source.error(
                f"has {source.size} bytes, but the record at byte {position} ends at byte {ends}: truncated or extended"
            )
    if todo or len(complete) > 1:
        raise source.error("can be read in several ways by the two layouts of burnpack, or has too many records")
    if not complete:
        raise problem or source.error("has no burnpack record")
    return complete[0]


def _parse(source: Source, start: int) -> _Record:
    """Return the record at `start`, with the layouts that its offsets allow."""
    version = int.from_bytes(source.view[start + 4 : start + 6], "little")
    length = int.from_bytes(source.view[start + 6 : start + HEADER], "little")
    stop = start + HEADER + length
    if start + HEADER > source.size or length > MAX_METADATA or stop > source.size:
        raise source.error(f"declares {length} bytes of metadata at byte {start}: truncated, or not burnpack")
    if version != 1:
        raise source.error(f"burnpack version {version} is not known; version 1 is")
    root = cbor.parse(source, start + HEADER, stop)
    known = {"tensors", "metadata", "scalars"}
    if not isinstance(root, dict) or not isinstance(root.get("tensors"), dict) or root.keys() - known:
        raise source.error("has metadata that is no table of tensors, metadata and scalars")
    metadata, scalars = root.get("metadata", {}), root.get("scalars", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise source.error("has metadata that is no table of strings")
    if not isinstance(scalars, dict) or not all(isinstance(v, dict) and len(v) == 1 for v in scalars.values()):
        raise source.error("has scalars that are no table of typed values")
    entries = {name: _entry(source, name, entry) for name, entry in root["tensors"].items()}
    record = _Record(start, stop, entries, metadata, {name: next(iter(v.values())) for name, v in scalars.items()})
    record.choices = _layouts(source, record)
    return record


def _entry(source: Source, name: str, entry: object) -> _Entry:
    required = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() - {"param_id"} != required:
        raise source.error("its entry does not have exactly dtype, shape and data_offsets", name)
    dtype, shape = _dtype(source, name, entry["dtype"]), check_shape(source, name, entry["shape"])
    offsets, param_id = entry["data_offsets"], entry.get("param_id")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(offset) for offset in offsets):
        raise source.error("data_offsets are not two byte positions", name)
    if param_id is not None and not isinstance(param_id, int):
        raise source.error("param_id is not a number", name)
    start, stop = offsets
    if stop < start:
        raise source.error(f"ends at {stop}, before its start at {start}", name)
    if dtype in _BITS:
        needed = byte_size(source, name, shape, _BITS[dtype])
        if stop - start != needed:
            raise source.error(f"has {stop - start} bytes, but {dtype} {list(shape)} needs {needed}", name)
    return _Entry(dtype, shape, Span(start, stop, name), param_id)


def _dtype(source: Source, name: str, dtype: object) -> str:
    """Return the name of a dtype: a string, or in Burn 0.21 and later a table such as {"Bool": "Native"}."""
    if isinstance(dtype, dict) and len(dtype) == 1:
        ((kind, detail),) = dtype.items()
        if kind == "Bool" and detail in ("Native", "U8", "U32"):
            return "BOOL" if detail == "Native" else f"BOOL_{detail}"
        if kind == "QFloat":
            # Packed values with their scales: compared as bytes, under a name that holds the whole scheme.
            return "QFloat " + json.dumps(detail, sort_keys=True, default=lambda raw: raw.hex())
    if dtype == "Bool":
        return "BOOL"
    if isinstance(dtype, str) and dtype in _BITS and not dtype.startswith("BOOL"):
        return dtype
    raise source.error(f"dtype {quote(dtype)} is not known", name)


def _layouts(source: Source, record: _Record) -> dict[str, tuple[int, int]]:
    """Return the (data section, end) of each layout that the offsets allow; refuse offsets that allow neither."""
    starts = {"aligned": record.start + _up(record.metadata_stop - record.start), "packed": record.metadata_stop}
    spans = sorted(entry.span for entry in record.entries.values())
    end = max((span.stop for span in spans), default=0)
    choices = {}
    for layout, base in starts.items():
        step, position = (ALIGN if layout == "aligned" else 1), 0
        for span in spans:
            if span.start != _up(position, step):
                break
            position = span.stop
        else:
            choices[layout] = (base, base + end)
    if not choices:
        # Names the tensor and says what is wrong with it.
        aligned = all(span.start % ALIGN == 0 for span in spans)
        check_tiling(source, spans, starts["aligned" if aligned else "packed"], 1 << 63, ALIGN if aligned else 1)
        raise source.error("has tensors at offsets that neither layout of burnpack allows")
    if starts["aligned"] == starts["packed"] or not spans:
        choices.pop("packed", None)  # the same reading, or a record without tensors, which Burn 0.19 did not write
    return choices


def _up(position: int, step: int = ALIGN) -> int:
    return -(-position // step) * step


def _check(source: Source, record: _Record, layout: str) -> None:
    """Refuse a record whose padding is not zero, or that may be the other layout cut short."""
    base, stop = record.choices[layout]
    spans = [entry.span for entry in record.entries.values()]
    check_tiling(source, spans, base, stop, ALIGN if layout == "aligned" else 1)
    if layout == "aligned" and not source.is_zero(record.metadata_stop, base):
        raise source.error(f"has padding that is not zero before its data section at byte {base}")
    if layout == "packed" and "aligned" in record.choices:
        # All offsets are multiples of 256, so this may be a record of Burn 0.20 that lost as many bytes at its end as
        # the padding before its data section has. Only bytes in that place that are not zero rule it out.
        other, _ = record.choices["aligned"]
        if source.is_zero(base, min(other, stop)):
            raise source.error(
                f"is either a burnpack record of Burn 0.19 that starts with zeros, or one of a later version that lost "
                f"its last {other - base} bytes"
            )


def _check_preamble(source: Source, start: int, lengths: list[int]) -> None:
    """Refuse bytes before the first record that do not state the length of every record."""
    preamble = bytes(source.view[:start])
    for length in set(lengths):
        if preamble.count(length.to_bytes(4 if length < 1 << 32 else 8, "little")) < lengths.count(length):
            raise source.error(f"starts with {start} bytes that do not state the length of its records ({lengths})")


def _checkpoint(source: Source, chain: list[tuple[_Record, str]]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, object] = {}
    notes: list[str] = []
    own = {str(e.param_id): name for record, _ in chain for name, e in record.entries.items() if e.param_id is not None}
    for index, (record, layout) in enumerate(chain):
        prefix = f"record{index}." if len(chain) > 1 else ""
        base, _ = record.choices[layout]
        paths = own | {key: path for key, path in record.metadata.items() if key.isdecimal()}
        names = {name: prefix + _renamed(name, paths) for name in [*record.entries, *record.scalars]}
        for name, entry in record.entries.items():
            if names[name] in tensors:
                raise source.error(f"has the same path as another tensor, {quote(names[name])}", name)
            data = source.array[base + entry.span.start : base + entry.span.stop]
            tensors[names[name]] = Tensor(entry.dtype, entry.shape, data)
        unnamed = [name for name in names if _parameter(name) and _renamed(name, paths) == name]
        if unnamed:
            notes.append(
                f"{len(unnamed)} names start with a parameter id that no path is known for: {quote(unnamed[0])}"
            )
        metadata.update({prefix + key: value for key, value in record.metadata.items() if not key.isdecimal()})
        metadata.update({names[name]: value for name, value in record.scalars.items()})
        ids = {names[name]: entry.param_id for name, entry in record.entries.items() if entry.param_id is not None}
        if ids:
            metadata[prefix + "param_id"] = ids
    return Checkpoint(source.path, "burnpack", by_name(tensors), metadata, tuple(notes))


def _parameter(name: str) -> str | None:
    """Return the parameter id that a name starts with. Ids are random 64-bit numbers; an index in a list is small."""
    head, dot, _ = name.partition(".")
    return head if dot and head.isdecimal() and 10 <= len(head) <= 20 else None


def _renamed(name: str, paths: dict[str, str]) -> str:
    head, dot, rest = name.partition(".")
    return f"{paths[head]}.{rest}" if dot and head in paths else name
