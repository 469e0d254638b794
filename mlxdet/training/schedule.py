"""Learning rates as pure functions of the step: linear warmup, then cosine, warmup-stable-decay, or constant.

Formulas, with s the step from 0: warmup max*(s+1)/warmup; cosine min+(max-min)*(1+cos(pi*p))/2 over the steps after
warmup; wsd (Hu et al., MiniCPM, arXiv:2404.06395) max until the last `decay_steps`, whose default shape 1-sqrt(p) is
from Hägele et al., arXiv:2405.18392.
"""

import math
from collections.abc import Sequence

from mlxdet.config import OptimConfig
from mlxdet.training.detours import Detour, factor_at


def learning_rate(config: OptimConfig, step: int, detours: Sequence[Detour] = ()) -> float:
    """Return the learning rate of `step` (1-based, as everywhere in a run), of a resolved config, after `detours`."""
    rate = _scheduled(config, step)
    return rate * factor_at(detours, step, config.rollback_factor, config.rollback_ramp) if detours else rate


def _scheduled(config: OptimConfig, step: int) -> float:
    s = step - 1
    high, low = config.max_lr, config.min_lr
    assert config.warmup is not None and low is not None
    if s < config.warmup:
        return high * (s + 1) / config.warmup
    if config.schedule == "constant":
        return high
    if config.schedule == "cosine":
        p = (s - config.warmup) / max(1, config.steps - config.warmup)
        return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * p))
    assert config.decay_steps
    p = max(0.0, (s - (config.steps - config.decay_steps)) / config.decay_steps)
    fall = {"1-sqrt": math.sqrt(p), "linear": p, "cosine": 0.5 * (1.0 - math.cos(math.pi * p))}[config.decay_shape]
    return high - (high - low) * fall
