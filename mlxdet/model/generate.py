"""Text from a model: one token after another, drawn on the host from its own stream.

Keys and values of earlier tokens are kept. When the context is full the last half of it is read again and goes on from
there: positions are learned, so a window cannot slide one token at a time without reading all of it again.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlxdet.config import ModelConfig
from mlxdet.model import gpt
from mlxdet.seeds import Splitmix64


def pick(logits: np.ndarray, temperature: float, top_k: int, rng: Splitmix64) -> int:
    """Return a token id drawn from logits, float64 (V,), with exactly one draw of `rng` (none at temperature 0).

    temperature 0 takes the most likely token (the first among equals); top_k 0 keeps all.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp((logits[order] - logits[order[0]]) / temperature)
    cumulative = np.cumsum(p)
    # The top 53 bits of a draw are a float64 in [0, 1), exactly.
    u = (rng.next() >> 11) * 2.0**-53 * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, u, side="right")), len(order) - 1)])


def generate(
    weights: gpt.Weights,
    config: ModelConfig,
    ops: gpt.Ops,
    dtype: mx.Dtype,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float,
    top_k: int,
    rng: Splitmix64,
) -> Iterator[int]:
    """Yield `tokens` ids that follow the ids of `prompt` (at least one; all within the vocabulary)."""
    assert config.context
    text = list(prompt)
    past: gpt.Past | None = None
    unread = text[-config.context :]
    for _ in range(tokens):
        if past is None or gpt.past_length(past) + len(unread) > config.context:
            past = []
            unread = text[-config.context :] if len(text) <= config.context else text[-max(1, config.context // 2) :]
        e = gpt.embed(weights, mx.array([unread], mx.int32), dtype)
        h, past = gpt.hidden_from(weights, e, config, ops, past)
        logits = np.array(gpt.logits(weights, h[0, -1])).astype(np.float64)
        token = pick(logits, temperature, top_k, rng)
        text.append(token)
        unread = [token]
        yield token
