"""Nested dictionaries and lists of arrays as a checkpoint, so that arrays in memory compare as files do."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxdet.errors import UsageError
from mlxdet.formats import Checkpoint, Tensor, from_numpy

# numpy dtypes of the ml_dtypes package (JAX uses them) by name, as checkpoints call them.
_ML_DTYPES = {
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def from_tree(tree: Mapping[str, Any] | Sequence[Any], label: str) -> Checkpoint:
    """Return a tree of arrays (numpy, MLX, or anything numpy can read) as a checkpoint called `label`.

    Names are the keys and indices on the way, joined by dots; numbers count as 0-d arrays. An mlx.nn.Module is a
    dictionary of its parameters. Raises UsageError for a leaf that is not an array or a name that two leaves share.
    """
    tensors: dict[str, Tensor] = {}
    for name, leaf in _leaves(tree, ""):
        if name in tensors:
            raise UsageError(f"{label}: two arrays are both called {name!r}")
        tensors[name] = _tensor(leaf, f"{label}: {name or 'the array'}")
    return Checkpoint(Path(label), "arrays", dict(sorted(tensors.items())))


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        items = [(str(k), v) for k, v in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(i), v) for i, v in enumerate(tree)]
    else:
        yield name, tree
        return
    for key, value in items:
        if value is not None:
            yield from _leaves(value, f"{name}.{key}" if name else key)


def _tensor(leaf: Any, where: str) -> Tensor:
    if type(leaf).__module__.startswith("mlx.") and str(leaf.dtype) == "mlx.core.bfloat16":
        import mlx.core as mx

        return from_numpy(np.array(leaf.view(mx.uint16)), "BF16")
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
        raise UsageError(f"{where}: {type(leaf).__name__} is not an array")
    if isinstance(leaf, np.ma.MaskedArray):
        raise UsageError(f"{where}: a masked array; fill it, or compare data and mask as two arrays")
    try:
        array = np.asarray(leaf)
        name = _ML_DTYPES.get(array.dtype.name)
        if name is not None:
            return from_numpy(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}"), name)
        return from_numpy(array)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(f"{where}: {problem}") from None
