"""A pre-norm GPT in the style of GPT-2 as pure functions over a flat dictionary of named weights.

Learned positions, LayerNorm with bias (eps 1e-5), exact GELU, fused QKV, tied head. Attention and LayerNorm come from
the backend (`Ops`): MLX's fused kernels where they cannot race, plain operations where they can. The embedding lookup
stays outside `logits`, so that its gradient can be computed without a scatter (model/embedding.py).

Packed rows (several in one window) attend within themselves only, and their positions start at 0 each. Their rows of
the position table are gathered, not sliced, and so are looked up where the tokens' are, by `embed`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxdet.config import ModelConfig
from mlxdet.seeds import Splitmix64, stream

Weights = dict[str, mx.array]
Past = list[tuple[mx.array, mx.array]]  # per block: keys and values of earlier tokens, (B, H, T, D / H) each
EPS = 1e-5
INIT_STD = 0.02
TOKENS, POSITIONS = "token_embedding.weight", "position_embedding.weight"


@dataclass(frozen=True)
class Ops:
    """The operations that differ by device (mlxdet.model.ops chooses them)."""

    layer_norm: Callable[..., mx.array]  # (x, weight, bias, eps)
    # (q, k, v, scale, allowed), the first three (B, H, T, D), causal; allowed: None, or bool (B, 1, T, T), see `blocks`
    attention: Callable[..., mx.array]
    gelu: Callable[[mx.array], mx.array]
    cross_entropy: Callable[[mx.array, mx.array], mx.array]  # (logits (..., V) float32, targets (...)) -> (...)


def shapes(config: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight, by name, in name order. `config` is resolved."""
    assert config.layers and config.width and config.context and config.mlp
    d, m = config.width, config.mlp
    table: dict[str, tuple[int, ...]] = {TOKENS: (vocab, d), POSITIONS: (config.context, d)}
    for i in range(config.layers):
        b = f"blocks.{i}."
        table |= {f"{b}norm1.weight": (d,), f"{b}norm1.bias": (d,), f"{b}norm2.weight": (d,), f"{b}norm2.bias": (d,)}
        table |= {f"{b}attention.qkv.weight": (3 * d, d), f"{b}attention.qkv.bias": (3 * d,)}
        table |= {f"{b}attention.out.weight": (d, d), f"{b}attention.out.bias": (d,)}
        table |= {f"{b}mlp.up.weight": (m, d), f"{b}mlp.up.bias": (m,)}
        table |= {f"{b}mlp.down.weight": (d, m), f"{b}mlp.down.bias": (d,)}
    table |= {"norm.weight": (d,), "norm.bias": (d,)}
    return dict(sorted(table.items()))


def init(config: ModelConfig, vocab: int, seed: int) -> dict[str, np.ndarray]:
    """Return the initial weights, float32, drawn on the host: the same bits on every device and in every process.

    Matrices are near normal with standard deviation 0.02, the two projections into the residual stream smaller by
    sqrt(2 * layers) (GPT-2). A draw is the sum of the four 16-bit lanes of one 64-bit Splitmix64 output (Irwin-Hall, so
    cut at 3.46 deviations): integers, then one exact IEEE product each, where a logarithm or a cosine of the C library
    would differ between hosts. Each tensor has its own stream, so a wider MLP leaves the embeddings as they were.
    """
    weights: dict[str, np.ndarray] = {}
    assert config.layers
    for name, shape in shapes(config, vocab).items():
        if len(shape) == 1:
            weights[name] = np.full(shape, 1.0 if name.endswith("weight") else 0.0, np.float32)
            continue
        std = INIT_STD / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else INIT_STD
        draws = Splitmix64(stream(seed, "init:" + name)).draws(math.prod(shape))
        lanes = draws.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64) * 2 - 4 * 65535
        # Variance of one lane: (2**32 - 1) / 12; lanes were doubled to keep the mean an integer.
        unit = std / (2.0 * math.sqrt(4.0 * (2.0**32 - 1.0) / 12.0))
        weights[name] = (lanes * unit).astype(np.float32).reshape(shape)
    return weights


def past_length(past: Past) -> int:
    """Return how many tokens `past` holds."""
    return past[0][0].shape[2] if past else 0


def _drop(x: mx.array, rate: float, key: mx.array | None) -> mx.array:
    if key is None or rate == 0.0:
        return x
    return mx.where(mx.random.bernoulli(1.0 - rate, x.shape, key), x * (1.0 / (1.0 - rate)), 0.0)


def blocks(segments: mx.array) -> mx.array:
    """Return which keys each query may look at, bool (B, 1, T, T): those before it and itself, of its own segment.

    segments: integers (B, T), the packed row that each token belongs to.
    """
    t = mx.arange(segments.shape[-1])
    return ((t[:, None] >= t[None, :]) & (segments[:, :, None] == segments[:, None, :]))[:, None]


def hidden(
    w: Weights,
    e: mx.array,
    config: ModelConfig,
    ops: Ops,
    drop_key: mx.array | None = None,
    *,
    segments: mx.array | None = None,
    lora_dropout: float = 0.0,
) -> mx.array:
    """Return the final hidden states (B, T, D) of token embeddings e (B, T, D), T <= context, in e's dtype.

    `drop_key` turns dropout on: one key of MLX's generator, split once for all the places that drop. `segments`,
    integers (B, T): the packed row that each token belongs to; e is then `embed` with positions.
    """
    return hidden_from(w, e, config, ops, [], drop_key, segments=segments, lora_dropout=lora_dropout)[0]


def hidden_from(
    w: Weights,
    e: mx.array,
    config: ModelConfig,
    ops: Ops,
    past: Past,
    drop_key: mx.array | None = None,
    watch: list[mx.array] | None = None,
    *,
    segments: mx.array | None = None,
    lora_dropout: float = 0.0,
) -> tuple[mx.array, Past]:
    """As `hidden`, for tokens that follow those whose keys and values are `past` (empty: none).

    Returns the hidden states and the keys and values of all tokens so far. `watch` is given the residual stream, each
    (B, T, D): as it enters the first block, then as it leaves each block. Where `w` holds adapters (model/lora.py), the
    linear maps of their names use them; their inputs are dropped at the rate `lora_dropout`.
    """
    assert config.layers and config.heads and config.width and not (past and segments is not None)
    batch, length, width = e.shape
    head, places, start = width // config.heads, 2 * config.layers + 1, past_length(past)
    adapted = sorted(name for name in w if name.endswith(".lora.up")) if lora_dropout else []
    keys: list[mx.array | None] = [None] * (places + len(adapted))
    if drop_key is not None:
        keys = list(mx.random.split(drop_key, len(keys)))
    lora_keys = dict(zip(adapted, keys[places:], strict=True))
    now: Past = []

    def cast(name: str) -> mx.array:
        return w[name].astype(e.dtype)

    def norm(x: mx.array, name: str) -> mx.array:
        return ops.layer_norm(x, cast(name + ".weight"), cast(name + ".bias"), EPS)

    def linear(x: mx.array, name: str) -> mx.array:
        y = x @ cast(name + ".weight").T + cast(name + ".bias")
        if name + ".lora.up" in w:
            low = _drop(x, lora_dropout, lora_keys.get(name + ".lora.up")) @ cast(name + ".lora.down").T
            y = y + low @ cast(name + ".lora.up").T
        return y

    allowed = None if segments is None else blocks(segments)
    x = e + cast(POSITIONS)[start : start + length] if segments is None else e
    x = _drop(x, config.dropout, keys[0])
    seen = [x]
    for i in range(config.layers):
        block = f"blocks.{i}."
        qkv = linear(norm(x, block + "norm1"), block + "attention.qkv")
        q, k, v = qkv.reshape(batch, length, 3, config.heads, head).transpose(2, 0, 3, 1, 4)
        if past:
            k, v = mx.concatenate([past[i][0], k], axis=2), mx.concatenate([past[i][1], v], axis=2)
        now.append((k, v))
        a = ops.attention(q, k, v, head**-0.5, allowed).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + _drop(linear(a, block + "attention.out"), config.dropout, keys[2 * i + 1])
        up = ops.gelu(linear(norm(x, block + "norm2"), block + "mlp.up"))
        x = x + _drop(linear(up, block + "mlp.down"), config.dropout, keys[2 * i + 2])
        seen.append(x)
    out = norm(x, "norm")
    if watch is not None:
        watch += [*seen, out]
    return out, now


def logits(w: Weights, h: mx.array) -> mx.array:
    """Return float32 logits (..., vocab) of hidden states (..., D); the head is the token embedding."""
    return (h @ w[TOKENS].astype(h.dtype).T).astype(mx.float32)


def embed(w: Weights, ids: mx.array, dtype: mx.Dtype, positions: mx.array | None = None) -> mx.array:
    """Return the token embeddings (..., D) of ids (...), in `dtype`, with the rows of `positions` (...) if given added.

    MLX checks neither ids nor positions: the data layer does.
    """
    e = w[TOKENS][ids].astype(dtype)
    return e if positions is None else e + w[POSITIONS].astype(dtype)[positions]
