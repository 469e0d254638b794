""".tinygpt: the container of PostTrainLLM, version 2.

    "TGPT" | version u32 | header length u32 | header, JSON | step i32 | body

The body has one of two layouts. Training: for each tensor of the manifest, in its order, weight and both moments of
AdamW in float32. Inference: all weights in float16, each at its `floatOffset`. The file does not say which one as
plainly: it is inference if `weightDtype` is fp16 or `includesOptimizerState` is false.

The weights of linear layers lie transposed, [in, out], while the manifest gives them as [out, in]; embeddings do not.
They are turned here, so that shape and bytes agree and a checkpoint can be compared with one of another format.

Format: native-mac/Sources/TinyGPTIO/TinyGPTFile.swift and Manifest.swift of PostTrainLLM/posttrainllm.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import Span, check_shape, check_tiling, count, is_count, parse_json
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import DeferredTensor, Tensor

MAGIC = b"TGPT"
_EMBEDDINGS = ("token_embedding.weight", "position_embedding.weight")


class _Part(NamedTuple):
    """A buffer of the body: the tensor it is for, and the entry of the manifest it came from."""

    span: Span
    entry: str
    shape: tuple[int, ...]


def looks_like(source: Source) -> bool:
    """Return whether the file starts with the magic bytes of a .tinygpt file."""
    return source.view[:4] == MAGIC


def read(source: Source) -> Checkpoint:
    """Return the tensors of a .tinygpt file, AdamW's moments of `name` as `name.m` and `name.v`. Raises FormatError."""
    if source.size < 12:
        raise source.error("is too short for a .tinygpt file")
    version, length = (int.from_bytes(source.view[start : start + 4], "little") for start in (4, 8))
    if version != 2:
        raise source.error(f".tinygpt version {version} is not known; version 2 is")
    base = 12 + length + 4
    if base > source.size:
        raise source.error(f"declares a header of {length} bytes, but has {source.size}: truncated")
    header = parse_json(source, 12, 12 + length, "its header")
    if not isinstance(header, dict) or not isinstance(header.get("manifest"), list):
        raise source.error("has a header without a manifest")
    parts, dtype = _parts(source, header)
    check_tiling(source, [part.span for part in parts], base, source.size)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if part.span.name in tensors:
            raise source.error("is there twice", part.span.name)
        data = source.array[base + part.span.start : base + part.span.stop]
        tensors[part.span.name] = _tensor(part, dtype, data)
    step = int.from_bytes(source.view[base - 4 : base], "little", signed=True)
    metadata = {key: value for key, value in header.items() if key != "manifest"}
    return Checkpoint(source.path, "tinygpt", by_name(tensors), {**metadata, "step": step})


def _parts(source: Source, header: dict) -> tuple[list[_Part], str]:
    """Return the buffers that the manifest describes and their dtype."""
    kind, moments = header.get("weightDtype", "fp32"), header.get("includesOptimizerState", True)
    if kind not in ("fp32", "fp16") or not isinstance(moments, bool):
        raise source.error(f"weightDtype {quote(kind)} is not known; fp32 and fp16 are")
    entries = list(_entries(source, header["manifest"]))
    parts, position = [], 0
    if kind == "fp16" or not moments:
        for name, shape, offset in entries:
            if not isinstance(offset, int) or not is_count(offset):
                raise source.error("has no floatOffset", name)
            parts.append(_Part(Span(2 * offset, 2 * (offset + count(shape)), name), name, shape))
        return parts, "F16"
    for name, shape, _ in entries:
        for suffix in ("", ".m", ".v"):
            stop = position + 4 * count(shape)
            parts.append(_Part(Span(position, stop, name + suffix), name, shape))
            position = stop
    return parts, "F32"


def _entries(source: Source, manifest: list) -> Iterator[tuple[str, tuple[int, ...], object]]:
    for entry in manifest:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise source.error("has a manifest with an entry that has no name")
        name = entry["name"]
        yield name, check_shape(source, name, entry.get("shape")), entry.get("floatOffset")


def _tensor(part: _Part, dtype: str, data: np.ndarray) -> Tensor:
    if len(part.shape) != 2 or not part.entry.endswith(".weight") or part.entry in _EMBEDDINGS:
        return Tensor(dtype, part.shape, data)
    rows, columns = part.shape
    code = {"F32": "<u4", "F16": "<u2"}[dtype]

    def turned() -> np.ndarray:
        return np.ascontiguousarray(data.view(code).reshape(columns, rows).T).reshape(-1).view(np.uint8)

    return DeferredTensor(dtype, part.shape, turned)
