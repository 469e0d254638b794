"""What a step minimises, as pure functions of per-token log-probabilities and of which tokens are scored.

Each returns one float32 vector of sums, `[loss, ...]`, in the order of `Objective.measures`, over the units of a
micro-batch: scored tokens (lm, sft) or pairs (dpo, orpo, simpo). Sums of micro-batches are added, then divided once by
the units of the whole step, so accumulation weighs every token, or every pair, the same.

    lm, sft  - log p(token)                                              the sum over scored tokens
    dpo      - log sigmoid(r_c - r_r),  r = beta * (log p - log p_ref)   Rafailov et al., arXiv:2305.18290, eq. 7
    orpo     - mean_c + beta * -log sigmoid(odds_c - odds_r)             Hong et al., arXiv:2403.07691, eq. 6 and 7
    simpo    - log sigmoid(r_c - r_r - gamma),  r = beta * mean          Meng et al., arXiv:2405.14734, eq. 6

c is the chosen answer, r the rejected one; log p is the sum of its scored tokens' log-probabilities, mean that sum over
their number, odds the log-odds mean - log(1 - exp(mean)). beta is lambda in the paper of orpo.

Exact values: where policy and reference are the same numbers, dpo's rewards and margins are exactly 0 and the loss of a
pair is float32's ln 2 (0x1.62e430p-1) on the CPU, elsewhere the device's logaddexp(0, 0); the mean over pairs is
that number too where the numbers of pairs and of micro-batches are powers of two, else it is rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

# A probability that rounds to 1 counts as 1 - 2**-24: its odds would be infinite.
_CERTAIN = -(2.0**-24)


@dataclass(frozen=True)
class Objective:
    """One objective. `sums`: (log-probabilities, scored, reference, beta, gamma) -> float32 (len(measures),)."""

    name: str
    sums: Callable[..., mx.array]
    measures: tuple[str, ...] = ("loss",)
    pairs: bool = False  # its unit: pairs, not tokens
    reference: bool = False  # needs log-probabilities under the frozen reference
    beta: float | None = None  # the default; None: it has none
    gamma: float | None = None


def scored_sums(logp: mx.array, scored: mx.array) -> mx.array:
    """Return the sum over scored tokens of each line, float32 (lines,).

    logp float32 (lines, L), scored bool (lines, L), both by target: entry t is that of tokens[:, t + 1]. A choice, not
    a product, so what is not scored cannot reach the sum, whatever its value.
    """
    return mx.where(scored, logp, 0.0).sum(axis=-1)


def scored_means(logp: mx.array, scored: mx.array) -> mx.array:
    """As `scored_sums`, divided by the number of scored tokens; 0 for a line without any."""
    return scored_sums(logp, scored) / mx.maximum(scored.sum(axis=-1), 1).astype(mx.float32)


def softplus(x: mx.array) -> mx.array:
    """Return log(1 + exp(x)) = -log sigmoid(-x), float32, without overflow; 0 at -inf.

    Not as max(x, 0) + log1p(exp(-|x|)): equal numbers, but autograd gives that a slope of 0 at x = 0, not 1/2, and dpo
    starts at x = 0.
    """
    return mx.logaddexp(x, mx.array(0.0))


def log_odds(mean: mx.array) -> mx.array:
    """Return mean - log(1 - exp(mean)) of a mean log-probability < 0, float32; see _CERTAIN for 0."""
    a = mx.minimum(mean, _CERTAIN)
    return a - mx.log(-mx.expm1(a))


def _sides(lines: mx.array) -> tuple[mx.array, mx.array]:
    """Chosen and rejected. Not by mx.split: MLX 0.32.4 fails to compile two splits of one array."""
    pairs = lines.shape[0] // 2
    return lines[:pairs], lines[pairs:]


def _of_pairs(loss: mx.array, rewards: mx.array) -> mx.array:
    """Return the sums of a pair's measures: loss (P,), rewards (2P,), chosen first. Measures carry no gradient."""
    chosen, rejected = _sides(mx.stop_gradient(rewards))
    margin = chosen - rejected
    accurate = (margin > 0).astype(mx.float32)
    return _tree(mx.stack([loss, chosen, rejected, margin, accurate]))


def _tree(parts: mx.array) -> mx.array:
    """Return the sums of (m, P) over P, float32 (m,), by halves: exact for a power of two of equal numbers.

    One after another, as some kernels add, sixteen times ln 2 is not 16 ln 2.
    """
    while (n := parts.shape[1]) > 1:
        half = n // 2
        halves = parts[:, :half] + parts[:, half : 2 * half]
        parts = mx.concatenate([halves, parts[:, 2 * half :]], axis=1) if n % 2 else halves
    return parts[:, 0]


def tokens(logp: mx.array, scored: mx.array, *_: object) -> mx.array:
    """lm and sft: float32 (1,)."""
    return -scored_sums(logp, scored).sum(keepdims=True)


def dpo(logp: mx.array, scored: mx.array, reference: mx.array, beta: float, _: float | None = None) -> mx.array:
    """float32 (5,). logp and scored (2P, L), chosen first; reference float32 (2P,): `scored_sums` under it."""
    rewards = beta * (scored_sums(logp, scored) - reference)
    chosen, rejected = _sides(rewards)
    return _of_pairs(softplus(rejected - chosen), rewards)


def orpo(logp: mx.array, scored: mx.array, _: mx.array | None, beta: float, __: float | None = None) -> mx.array:
    """float32 (5,). logp and scored (2P, L), chosen first. A reward is beta * mean."""
    means = scored_means(logp, scored)
    chosen, rejected = _sides(log_odds(means))
    return _of_pairs(beta * softplus(rejected - chosen) - _sides(means)[0], beta * means)


def simpo(logp: mx.array, scored: mx.array, _: mx.array | None, beta: float, gamma: float) -> mx.array:
    """float32 (5,). logp and scored (2P, L), chosen first. The margin that is measured is without gamma."""
    rewards = beta * scored_means(logp, scored)
    chosen, rejected = _sides(rewards)
    return _of_pairs(softplus(rejected - chosen + gamma), rewards)


_PAIR = ("loss", "reward_chosen", "reward_rejected", "margin", "accuracy")
# Defaults: beta of dpo and lambda of orpo as their papers use them; simpo as its authors recommend to start.
OBJECTIVES: dict[str, Objective] = {
    o.name: o
    for o in (
        Objective("lm", tokens),
        Objective("sft", tokens),
        Objective("dpo", dpo, _PAIR, pairs=True, reference=True, beta=0.1),
        Objective("orpo", orpo, _PAIR, pairs=True, beta=0.1),
        Objective("simpo", simpo, _PAIR, pairs=True, beta=2.0, gamma=0.5),
    )
}
