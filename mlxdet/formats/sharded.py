"""A checkpoint in several files with an index: `*.safetensors.index.json`, `pytorch_model.bin.index.json`.

    {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

The shards lie beside the index, whatever its text says: a name that leads elsewhere is refused. Every tensor of the
index must be in its shard, and every tensor of a shard in the index.
"""

import json
from collections.abc import Callable

from mlxdet.formats.checkpoint import Checkpoint, by_name
from mlxdet.formats.checks import MAX_HEADER, parse_json
from mlxdet.formats.source import Source, quote
from mlxdet.formats.tensor import Tensor


def looks_like(source: Source) -> bool:
    """Return whether the file is JSON with a weight_map, by its first byte and that word."""
    if source.size > MAX_HEADER or bytes(source.view[:64]).lstrip()[:1] != b"{":
        return False
    return source.find(b'"weight_map"', 0, source.size) >= 0


def shards(source: Source) -> set[str]:
    """Return the names of the shards that the index in `source` gives; none if it is damaged, which `read` tells."""
    try:
        return {shard for shard in json.loads(bytes(source.view))["weight_map"].values() if isinstance(shard, str)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()


def read(source: Source, open_file: Callable[[Source], Checkpoint]) -> Checkpoint:
    """Return the tensors of all shards of the index in `source`. Raises FormatError, naming the index or the shard."""
    index = parse_json(source, 0, source.size, "the index")
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
        raise source.error("has a weight_map that does not give each tensor a file")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, object] = {}
    notes: list[str] = []
    unread: list[str] = []
    tied: list[tuple[str, ...]] = []
    for shard in sorted(set(table.values())):
        if shard in ("", ".", "..") or any(mark in shard for mark in "/\\:\0"):
            raise source.error(f"names the shard {quote(shard)}, which is not a file beside it")
        part = open_file(Source(source.path.parent / shard))
        listed = {name for name, file in table.items() if file == shard}
        for name in sorted(listed ^ part.tensors.keys()):
            where = "lacks it" if name in listed else "has it, but the index does not"
            raise source.error(f"shard {quote(shard)} {where}", name)
        tensors.update(part.tensors)
        if part.metadata:
            metadata[shard] = dict(part.metadata)
        notes += [f"{shard}: {note}" for note in part.notes]
        unread += part.unread
        tied += part.tied
    declared = index.get("metadata", {})
    if isinstance(declared, dict):
        metadata["index"] = declared
    return Checkpoint(source.path, "sharded", by_name(tensors), metadata, tuple(notes), tuple(unread), tuple(tied))
