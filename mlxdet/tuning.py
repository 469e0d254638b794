"""What goes together when a model is tuned: rows, objectives, adapters; and what is refused, before a run is made."""

import dataclasses

from mlxdet.config import FIELDS, TrainConfig, TuneConfig, flag
from mlxdet.errors import UsageError

# Target -> the linear map of each block that it names.
TARGETS = {"qkv": "attention.qkv", "out": "attention.out", "up": "mlp.up", "down": "mlp.down"}


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the targets that "all" or a list such as "qkv,down" names, in the order of TARGETS. Raises UsageError."""
    names = list(TARGETS) if text == "all" else [name.strip() for name in text.split(",")]
    odd = [name for name in names if name not in TARGETS]
    if odd or len(set(names)) < len(names):
        what = f"{odd[0]!r} is not a linear map of the model" if odd else "a name is there twice"
        raise UsageError(f"--lora-targets: {what}; give all, or some of {','.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in names)


def resolved(config: TrainConfig) -> TuneConfig:
    """Return the section `tune` with its defaults. What the objective has no use for is refused, never ignored."""
    t, m, d = config.tune, config.model, config.data
    rows, pairs = t.objective != "lm", t.objective in ("dpo", "orpo", "simpo")
    unused = [
        ("beta", t.beta is not None and not pairs, "is for dpo, orpo and simpo"),
        ("gamma", t.gamma is not None and t.objective != "simpo", "is for simpo"),
        ("rows", d.rows != "sft" and t.objective != "sft", "is for sft"),
        ("packing", d.packing and t.objective != "sft", "is for sft"),
        ("template", d.template != "plain" and not rows, "is for rows, not text"),
        ("truncate", d.truncate and not rows, "is for rows, not text"),
    ]
    for name, wrong, why in unused:
        if wrong:
            raise UsageError(f"{flag(name)}: {why}; the objective is {t.objective} (--objective)")
    if rows and d.order != "windows":
        raise UsageError("--order: is for text; rows are taken once per epoch, in a new permutation each time")
    if not t.lora_rank:
        for name in ("lora_alpha", "lora_targets", "lora_dropout"):
            if getattr(t, name) != FIELDS[name].default:
                raise UsageError(f"{flag(name)}: needs --lora-rank")
    if t.base is None and (t.lora_rank or t.objective == "dpo"):
        what = "--lora-rank: adapters stand on" if t.lora_rank else "--objective dpo: compares with"
        raise UsageError(f"{what} a trained run; name it with --from")
    if t.objective == "dpo":
        for name in ("dropout", "lora_dropout", "neftune_alpha"):
            if getattr(t if name == "lora_dropout" else m, name):
                raise UsageError(f"{flag(name)}: dpo compares policy and reference, so both go without noise")
    defaults = {"dpo": (0.1, None), "orpo": (0.1, None), "simpo": (2.0, 0.5)}.get(t.objective, (None, None))
    return dataclasses.replace(
        t,
        beta=defaults[0] if t.beta is None else t.beta,
        gamma=defaults[1] if t.gamma is None else t.gamma,
        lora_alpha=2.0 * t.lora_rank if t.lora_rank and t.lora_alpha is None else t.lora_alpha,
        lora_targets=",".join(parse_targets(t.lora_targets)) if t.lora_rank else t.lora_targets,
    )


def lora_scale(config: TrainConfig) -> float:
    """Return what the product of an adapter's matrices is multiplied by, of a resolved config with adapters."""
    assert config.tune.lora_alpha is not None
    return config.tune.lora_alpha / config.tune.lora_rank
