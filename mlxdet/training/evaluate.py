"""Validation over fixed windows or rows: means over tokens or pairs, the same ones every time, nothing drawn."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.model import gpt
from mlxdet.model.ops import ops_for
from mlxdet.training.objectives import OBJECTIVES, scored_sums
from mlxdet.training.step import DTYPES


class Evaluator:
    """The compiled loss of windows, and measures of rows, without dropout or noise."""

    def __init__(self, config: TrainConfig, backend: Backend):
        self.config, self.ops, self.dtype = config, ops_for(backend), DTYPES[config.model.dtype]
        self.objective = OBJECTIVES[config.tune.objective]
        self._rows, self._scores, self._sums = mx.compile(self.rows), mx.compile(self.scores), mx.compile(self.sums)

    def rows(self, weights: gpt.Weights, tokens: mx.array) -> mx.array:
        """Return the summed loss of each window, float32 (B,), of tokens int32 (B, T+1)."""
        return self._losses(weights, tokens).sum(axis=-1)

    def _losses(self, weights: gpt.Weights, tokens: mx.array) -> mx.array:
        e = gpt.embed(weights, tokens[:, :-1], self.dtype)
        h = gpt.hidden(weights, e, self.config.model, self.ops)
        return self.ops.cross_entropy(gpt.logits(weights, h), tokens[:, 1:])

    def scores(self, weights: gpt.Weights, tokens: mx.array, scored: mx.array) -> mx.array:
        """Return the log-probability of the answer in each line, float32 (B,): `objectives.scored_sums`."""
        return scored_sums(-self._losses(weights, tokens), scored)

    def sums(self, weights: gpt.Weights, tokens: mx.array, scored: mx.array, reference: mx.array) -> mx.array:
        """Return the sums of the objective's measures over pairs, float32 (m,)."""
        t = self.config.tune
        return self.objective.sums(-self._losses(weights, tokens), scored, reference, t.beta, t.gamma)

    def score(self, weights: gpt.Weights, tokens: np.ndarray, scored: np.ndarray) -> np.ndarray:
        """As `scores`, on the host."""
        return np.array(self._scores(weights, mx.array(tokens), mx.array(scored)))

    def means(
        self, weights: gpt.Weights, parts: Sequence[tuple[np.ndarray, np.ndarray]], references: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Return the means of the objective's measures, by name, over `parts` of rows (tokens, scored).

        `references`: of each part, float32 (lines,), `score` under the reference; empty where there is none.
        """
        if not self.objective.pairs:
            found = [self.score(weights, *part).tolist() for part in parts]
            return {"loss": -math.fsum(x for part in found for x in part) / sum(int(s.sum()) for _, s in parts)}
        sums = []
        for (tokens, scored), reference in zip(
            parts, references or [np.zeros(0, np.float32)] * len(parts), strict=True
        ):
            sums.append(np.array(self._sums(weights, mx.array(tokens), mx.array(scored), mx.array(reference))).tolist())
        pairs = sum(len(tokens) // 2 for tokens, _ in parts)
        columns = zip(self.objective.measures, np.transpose(sums), strict=True)
        return {name: math.fsum(column) / pairs for name, column in columns}

    def loss(self, weights: gpt.Weights, windows: Sequence[np.ndarray]) -> float:
        """Return the mean loss per token in nats over `windows`, each int32 (B, T+1).

        Rows are summed exactly on the host, so how they are grouped matters only through the kernels a shape selects.
        """
        sums = [np.array(self._rows(weights, mx.array(tokens))).tolist() for tokens in windows]
        scored = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in windows)
        return math.fsum(x for part in sums for x in part) / scored
