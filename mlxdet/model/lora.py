"""LoRA: a frozen linear map plus the product of two thin matrices that are trained (Hu et al., arXiv:2106.09685).

    y = x W^T + b + scale * (drop(x) down^T) up^T        scale = alpha / rank

The adapter of `blocks.0.mlp.up.weight`, (out, in), is `blocks.0.mlp.up.lora.down`, (rank, in), and `...lora.up`,
(out, rank); the paper calls them A and B. `up` starts at zero, so a fresh adapter leaves every logit as it was, to the
bit. The forward pass is in `gpt.hidden_from`, which takes base and adapters as one dictionary, made by `joined`.
"""

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlxdet.errors import UsageError
from mlxdet.formats.digest import content_digest
from mlxdet.formats.tensor import from_numpy
from mlxdet.seeds import Splitmix64, stream
from mlxdet.tuning import TARGETS, parse_targets

__all__ = ["TARGETS", "base_digest", "init", "joined", "merge", "parse_targets", "shapes"]

UP, DOWN, WEIGHT = ".lora.up", ".lora.down", ".weight"


def shapes(base: Mapping[str, tuple[int, ...]], rank: int, targets: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every adapter, by name, in name order. `base`: the shapes of the weights (gpt.shapes)."""
    ends = tuple("." + TARGETS[target] + WEIGHT for target in targets)
    table: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        if name.endswith(ends):
            stem = name.removesuffix(WEIGHT)
            table |= {stem + DOWN: (rank, shape[1]), stem + UP: (shape[0], rank)}
    return dict(sorted(table.items()))


def init(base: Mapping[str, tuple[int, ...]], rank: int, targets: tuple[str, ...], seed: int) -> dict[str, np.ndarray]:
    """Return fresh adapters, float32, drawn on the host: the same bits on every device. Arguments as of `shapes`.

    `up` is zero; `down` is uniform within 1 / sqrt(in), as in the implementations of PEFT and mlx-lm, from 24 bits of a
    draw of the tensor's own stream: an exact integer, then one IEEE product and one rounding.
    """
    adapters: dict[str, np.ndarray] = {}
    for name, shape in shapes(base, rank, targets).items():
        if name.endswith(UP):
            adapters[name] = np.zeros(shape, np.float32)
            continue
        draws = Splitmix64(stream(seed, "init:" + name)).draws(math.prod(shape))
        odd = 2 * (draws >> np.uint64(40)).astype(np.int64) + 1 - (1 << 24)  # symmetric about 0
        adapters[name] = (odd * (2.0**-24 / math.sqrt(shape[1]))).astype(np.float32).reshape(shape)
    return adapters


def joined(base: Mapping[str, mx.array], adapters: Mapping[str, mx.array], scale: float) -> dict[str, mx.array]:
    """Return base and adapters as the model takes them: `up` multiplied by `scale`.

    With gradients: by the adapters as they are, and none by the base, as long as only they are differentiated.
    """
    return {**base, **{k: a * scale if k.endswith(UP) else a for k, a in adapters.items()}}


def merge(base: Mapping[str, np.ndarray], adapters: Mapping[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Return the weights, float32, of a model without adapters that does the same, to rounding: W + scale * up down.

    Computed in float64, the rank's products added in their order (no BLAS, so the same bits on every host), and rounded
    to float32 once. Raises UsageError, naming tensors, if an adapter has no partner or does not fit its weight.
    """
    merged = dict(base)
    stems = sorted({name.removesuffix(UP).removesuffix(DOWN) for name in adapters})
    odd = [stem for stem in stems if not _fits(base, adapters, stem)]
    if odd:
        raise UsageError(f"the adapter does not fit this base: {', '.join(odd[:5])}{' ...' if odd[5:] else ''}")
    for stem in stems:
        up, down = adapters[stem + UP].astype(np.float64), adapters[stem + DOWN].astype(np.float64)
        delta = np.zeros((up.shape[0], down.shape[1]))
        for k in range(up.shape[1]):
            delta += up[:, k, None] * down[None, k]
        merged[stem + WEIGHT] = (base[stem + WEIGHT].astype(np.float64) + scale * delta).astype(np.float32)
    return merged


def _fits(base: Mapping[str, np.ndarray], adapters: Mapping[str, np.ndarray], stem: str) -> bool:
    if not (stem + WEIGHT in base and stem + UP in adapters and stem + DOWN in adapters):
        return False
    (rows, columns), up, down = base[stem + WEIGHT].shape, adapters[stem + UP].shape, adapters[stem + DOWN].shape
    return up[:1] + down[1:] == (rows, columns) and up[1:] == down[:1]


def base_digest(base: Mapping[str, np.ndarray]) -> str:
    """Return the content digest of a base, 64 hex digits: what `mlxdet digest` prints for a file of it."""
    return content_digest({name: from_numpy(w) for name, w in base.items()})
