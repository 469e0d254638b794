"""One digest for the content of a checkpoint, whatever file holds it.

A hash of a file depends on the order of its tensors, on padding, metadata and ids drawn at random; this one depends on
names, dtypes, shapes and bytes alone.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from mlxdet.formats.tensor import Tensor


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 64 hex digits: BLAKE2b-256 over (name, dtype, shape, bytes) of every tensor, in name order.

    Every field carries its length, so two different sets of tensors never give the same message. The order of `tensors`
    and the file they came from do not matter.
    """
    state = hashlib.blake2b(b"mlxdet tensors 1\n", digest_size=32)
    state.update(_number(len(tensors)))
    for name in sorted(tensors):
        tensor = tensors[name]
        data = np.ascontiguousarray(tensor.data)
        # A name that came out of a pickle may hold surrogates, which strict UTF-8 has no bytes for.
        for text in (name.encode("utf-8", "surrogatepass"), tensor.dtype.encode()):
            state.update(_number(len(text)) + text)
        state.update(_number(len(tensor.shape)) + b"".join(_number(length) for length in tensor.shape))
        state.update(_number(data.nbytes))
        state.update(data.data)
    return state.hexdigest()


def _number(value: int) -> bytes:
    return int(value).to_bytes(8, "little")
