"""Validation loss over fixed windows: the token-weighted mean, the same windows every time, nothing drawn."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.model import gpt
from mlxdet.model.ops import ops_for
from mlxdet.training.step import DTYPES


class Evaluator:
    """The compiled loss of windows without dropout or noise."""

    def __init__(self, config: TrainConfig, backend: Backend):
        self.config, self.ops, self.dtype = config, ops_for(backend), DTYPES[config.model.dtype]
        self._rows = mx.compile(self.rows)

    def rows(self, weights: gpt.Weights, tokens: mx.array) -> mx.array:
        """Return the summed loss of each window, float32 (B,), of tokens int32 (B, T+1)."""
        e = gpt.embed(weights, tokens[:, :-1], self.dtype)
        h = gpt.hidden(weights, e, self.config.model, self.ops)
        return self.ops.cross_entropy(gpt.logits(weights, h), tokens[:, 1:]).sum(axis=-1)

    def loss(self, weights: gpt.Weights, windows: Sequence[np.ndarray]) -> float:
        """Return the mean loss per token in nats over `windows`, each int32 (B, T+1).

        Rows are summed exactly on the host, so how they are grouped matters only through the kernels a shape selects.
        """
        sums = [np.array(self._rows(weights, mx.array(tokens))).tolist() for tokens in windows]
        scored = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in windows)
        return math.fsum(x for part in sums for x in part) / scored
