"""The one tree of settings: command-line options, TOML keys and the run's manifest are all read off these dataclasses.

A field carries its help text, its bounds and, as `comfort`, whether it can change speed or convenience only. What is
not comfort decides the bits of a run, and a resume that changes it is refused. (Where the text lies is comfort: what
it says decides, and is held by the digest of the corpus.) Field names are unique in the whole tree, so that every one
is also a flag: `max_lr` is `--max-lr` and `max_lr` under `[optim]`.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mlxdet.errors import UsageError
from mlxdet.seeds import parse_seed

PRESETS: dict[str, dict[str, int]] = {
    "nano": {"layers": 2, "width": 64, "heads": 2, "context": 64, "mlp": 256},
    "tiny": {"layers": 4, "width": 128, "heads": 4, "context": 128, "mlp": 512},
    "small": {"layers": 6, "width": 192, "heads": 6, "context": 256, "mlp": 768},
    "medium": {"layers": 12, "width": 256, "heads": 8, "context": 512, "mlp": 1024},
    "large": {"layers": 24, "width": 512, "heads": 8, "context": 1024, "mlp": 2048},
}


SHAPE = ("layers", "width", "heads", "context", "mlp")


def _opt(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    below: float | None = None,
    comfort: bool = False,
) -> Any:
    """A field with its help, allowed values (`choices`, or low <= value <= high, value < below) and kind."""
    return field(
        default=default,
        metadata={"help": help, "choices": choices, "low": low, "high": high, "below": below, "comfort": comfort},
    )


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of the GPT."""

    preset: str | None = _opt(
        None,
        "Shape to start from; any of its numbers can be set one by one. Default: tiny, or the shape of --from.",
        choices=tuple(PRESETS),
    )
    depth: int | None = _opt(None, "Derive the shape from one number: N layers, width 64N, N heads, mlp 256N.", low=1)
    layers: int | None = _opt(None, "Transformer blocks.", low=1)
    width: int | None = _opt(None, "Width of the residual stream; a multiple of --heads.", low=1)
    heads: int | None = _opt(None, "Attention heads.", low=1)
    context: int | None = _opt(None, "Tokens a window holds.", low=1)
    mlp: int | None = _opt(None, "Width of the hidden layer in each block.", low=1)
    dropout: float = _opt(0.0, "Share of activations dropped after the embedding and each branch.", low=0.0, below=1.0)
    dtype: str = _opt(
        "float32", "Type of activations; weights and moments stay float32.", choices=("float32", "bfloat16")
    )
    neftune_alpha: float = _opt(0.0, "Strength of uniform noise on the embeddings while training (NEFTune).", low=0.0)


@dataclass(frozen=True)
class DataConfig:
    """What is read, and in which order."""

    data: tuple[str, ...] = _opt(
        (),
        "File or directory (sorted by name), of text or rows (JSONL, Parquet); repeatable. Default: the embedded text.",
        comfort=True,
    )
    tokenizer: str | None = _opt(
        None, "Sentencepiece model; without one the text is read as bytes (vocabulary 256).", comfort=True
    )
    order: str = _opt(
        "windows",
        "windows: random windows, with replacement. epochs: every window once, in a new permutation each epoch.",
        choices=("windows", "epochs"),
    )
    val_fraction: float = _opt(
        0.1, "Share of the text, its last part, kept for validation; 0: none.", low=0.0, high=0.5
    )
    unk_limit: float = _opt(
        0.01, "Refuse a text of whose tokens a larger share is unknown.", low=0.0, high=1.0, comfort=True
    )
    cache_dir: str | None = _opt(None, "Where token ids are cached. Default: the user's cache directory.", comfort=True)
    rows: str = _opt("sft", "Form of the rows (--objective sft). sft: conversations. io: {input, output}.",
                     choices=("sft", "io"))  # fmt: skip
    template: str = _opt("plain", "How a conversation is written as text.", choices=("plain", "chatml", "llama"))
    packing: bool = _opt(False, "Put several rows in a window, each by itself (--objective sft).")
    truncate: bool = _opt(False, "Cut rows that are too long instead of dropping them.")


@dataclass(frozen=True)
class TuneConfig:
    """What is learned, from which weights on, and which of them move."""

    objective: str = _opt(
        "lm",
        "lm: every token of a text. sft: the answers of conversations. dpo, orpo, simpo: the chosen answer over the "
        "rejected one.",
        choices=("lm", "sft", "dpo", "orpo", "simpo"),
    )
    base: str | None = _opt(
        None, "Run whose newest weights are the start. With LoRA they stay frozen; for dpo they are the reference."
    )
    beta: float | None = _opt(
        None, "Strength of the preference (lambda of orpo). Default: dpo 0.1, orpo 0.1, simpo 2.", low=1e-6
    )
    gamma: float | None = _opt(None, "Margin that simpo aims at. Default: 0.5.", low=0.0)
    lora_rank: int = _opt(0, "Rank of LoRA's adapters; 0: no adapters, all weights are trained.", low=0)
    lora_alpha: float | None = _opt(None, "Adapters are scaled by alpha / rank. Default: twice the rank.", low=1e-6)
    lora_targets: str = _opt("all", "Linear maps with an adapter: all, or some of qkv,out,up,down.")
    lora_dropout: float = _opt(0.0, "Share of an adapter's inputs dropped while training.", low=0.0, below=1.0)


@dataclass(frozen=True)
class OptimConfig:
    """Steps, batch and AdamW."""

    steps: int = _opt(1000, "Optimizer steps of the whole run.", low=1)
    batch: int = _opt(16, "Windows in a micro-batch.", low=1)
    accumulation: int = _opt(1, "Micro-batches whose gradients are added into one step.", low=1)
    schedule: str = _opt(
        "cosine",
        "Learning rate after warmup. wsd: constant, then a decay.",
        choices=("cosine", "wsd", "constant"),
    )
    max_lr: float = _opt(2e-3, "Highest learning rate.", low=0.0)
    min_lr: float | None = _opt(
        None, "Learning rate at the end (cosine and wsd). Default: a twentieth of --max-lr.", low=0.0
    )
    warmup: int | None = _opt(
        None, "Steps of linear warmup, in every schedule. Default: a tenth of the steps, 100 at most.", low=0
    )
    decay_steps: int | None = _opt(None, "Length of the decay (wsd). Default: a tenth of the steps.", low=1)
    decay_shape: str = _opt("1-sqrt", "Form of the decay (wsd).", choices=("1-sqrt", "linear", "cosine"))
    weight_decay: float = _opt(0.1, "Decoupled weight decay, on matrices only.", low=0.0)
    beta1: float = _opt(0.9, "Decay of AdamW's first moment.", low=0.0, below=1.0)
    beta2: float = _opt(0.95, "Decay of AdamW's second moment.", low=0.0, below=1.0)
    eps: float = _opt(1e-8, "AdamW's epsilon.", low=1e-38)
    grad_clip: float = _opt(1.0, "Largest global norm of the gradient; 0: no clipping.", low=0.0)
    on_spike: str = _opt(
        "warn",
        "At a spike. skip: without its update. rollback: back to an earlier step, other data, smaller steps. "
        "stop: before its update.",
        choices=("warn", "skip", "rollback", "stop"),
    )
    rollback_steps: int = _opt(100, "Least number of steps a rollback goes back.", low=1)
    rollback_factor: float = _opt(0.5, "What a rollback multiplies the learning rate by.", low=0.0, high=1.0)
    rollback_ramp: int = _opt(200, "Steps in which the learning rate comes back after a rollback.", low=1)
    spike_detect: bool = _opt(True, "Look for spikes while training.")
    spike_window: int = _opt(100, "Steps that a step is compared with.", low=20)
    spike_factor: float = _opt(6.0, "Robust deviations above the median that make a spike.", low=1.0)


@dataclass(frozen=True)
class SeedConfig:
    """One seed for all; init and data can be held apart."""

    seed: int = _opt(0, "Seed of every random number, 0 to 2**64-1.")
    init_seed: int | None = _opt(None, "Seed of the initial weights. Default: --seed.")
    data_seed: int | None = _opt(None, "Seed of the order of the data. Default: --seed.")


@dataclass(frozen=True)
class LoopConfig:
    """Where it runs, and what happens beside the steps."""

    device: str = _opt("auto", "Device to run on.", choices=("auto", "metal", "cuda", "cpu"))
    kernels: str = _opt(
        "deterministic",
        "default: MLX's ordinary gradients, some of which race on a GPU; the control arm.",
        choices=("deterministic", "default"),
    )
    prefetch: int = _opt(2, "Batches made ahead in background threads; 0: none.", low=0, high=1024, comfort=True)
    throttle: float = _opt(
        0.0, "Share of the time to rest, to keep the machine cool.", low=0.0, below=1.0, comfort=True
    )
    val_every: int = _opt(100, "Steps between validations; 0: none.", low=0, comfort=True)
    val_windows: int = _opt(128, "Fixed windows a validation looks at.", low=1, comfort=True)
    save_every: int = _opt(200, "Steps between checkpoints; the last step is always saved.", low=0, comfort=True)
    keep: int = _opt(3, "Checkpoints to keep; 0: all.", low=0, comfort=True)
    sample_every: int = _opt(0, "Steps between text samples; 0: none.", low=0, comfort=True)
    sample_prompt: str = _opt("The ", "Prompt of the text samples.", comfort=True)
    sample_tokens: int = _opt(120, "Tokens of a text sample.", low=1, comfort=True)
    log_every: int = _opt(10, "Steps between lines of progress where the output is no terminal.", low=1, comfort=True)
    cache_limit: float | None = _opt(None, "Most memory MLX may keep for re-use, in GB.", low=0.0, comfort=True)


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is made of. `TrainConfig.of(preset="nano", steps=40, seed=7)` sets fields by their names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    seeds: SeedConfig = field(default_factory=SeedConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    @staticmethod
    def of(**values: Any) -> "TrainConfig":
        """Return the defaults with `values` set, by field name. Raises UsageError on an unknown name or a bad value."""
        return TrainConfig().replace(**values)

    def replace(self, **values: Any) -> "TrainConfig":
        """Return a copy with `values` set, by field name. Raises UsageError on an unknown name or a bad value."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in FIELDS:
                raise UsageError(f"unknown setting {name!r}; `mlxdet train --help` lists them")
            changed.setdefault(FIELDS[name].section, {})[name] = _typed(FIELDS[name], value, flag(name))
        return dataclasses.replace(
            self, **{s: dataclasses.replace(getattr(self, s), **kw) for s, kw in changed.items()}
        )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the tree as plain dictionaries, JSON-able."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def resolve(self) -> "TrainConfig":
        """Return the config with every derived value filled in. Raises UsageError where values do not fit together."""
        from mlxdet.tuning import resolved  # it reads the fields of this module

        m, o, s = self.model, self.optim, self.seeds
        shape: dict[str, Any] = PRESETS[m.preset or "tiny"] | given_shape(m)
        if shape["width"] % shape["heads"]:
            raise UsageError(f"--width: {shape['width']} is not a multiple of --heads {shape['heads']}")
        decay = o.decay_steps if o.decay_steps is not None else max(1, o.steps // 10)
        warmup = o.warmup if o.warmup is not None else min(100, o.steps // 10)
        min_lr = o.min_lr if o.min_lr is not None else o.max_lr / 20
        if min_lr > o.max_lr:
            raise UsageError(f"--min-lr: {min_lr} is above --max-lr {o.max_lr}")
        if warmup > o.steps:
            raise UsageError(f"--warmup: {warmup} steps of warmup do not fit in --steps {o.steps}")
        if o.schedule == "wsd" and warmup + decay > o.steps:
            raise UsageError(f"--decay-steps: warmup {warmup} + decay {decay} is more than --steps {o.steps}")
        if not o.spike_detect and o.on_spike != "warn":
            raise UsageError(f"--no-spike-detect: --on-spike {o.on_spike} needs the detection")
        seeds = dataclasses.replace(
            s,
            init_seed=s.seed if s.init_seed is None else s.init_seed,
            data_seed=s.seed if s.data_seed is None else s.data_seed,
        )
        return dataclasses.replace(
            self,
            model=dataclasses.replace(m, preset=m.preset or "tiny", depth=None, **shape),
            tune=resolved(self),
            optim=dataclasses.replace(o, decay_steps=decay, warmup=warmup, min_lr=min_lr),
            seeds=seeds,
        )


def given_shape(model: ModelConfig) -> dict[str, int]:
    """Return the numbers of the shape that were asked for: by --preset, over it by --depth, over both one by one."""
    shape = dict(PRESETS[model.preset]) if model.preset is not None else {}
    if (n := model.depth) is not None:
        shape |= {"layers": n, "width": 64 * n, "heads": n, "mlp": 256 * n}
    return shape | {k: v for k in SHAPE if (v := getattr(model, k)) is not None}


@dataclass(frozen=True)
class Field:
    """One leaf of the tree, as the command line and the TOML reader need it."""

    name: str
    section: str
    kind: type  # int, float, bool, str or tuple
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    below: float | None
    comfort: bool


def _fields() -> dict[str, Field]:
    table: dict[str, Field] = {}
    for section in dataclasses.fields(TrainConfig):
        cls: Any = section.type
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            args = [a for a in get_args(hints[f.name]) if a is not type(None)]
            optional = type(None) in get_args(hints[f.name])
            kind = tuple if hints[f.name] == tuple[str, ...] else args[0] if optional else hints[f.name]
            assert f.name not in table, f.name
            table[f.name] = Field(f.name, section.name, kind, optional, f.default, **f.metadata)
    return table


FIELDS: dict[str, Field] = _fields()
# Settings that decide bits only together with a policy that changes what is trained.
ROLLBACK = ("rollback_steps", "rollback_factor", "rollback_ramp")
SPIKES = ("on_spike", "spike_detect", "spike_window", "spike_factor", *ROLLBACK)
SEEDS = ("seed", "init_seed", "data_seed")
# Settings that decide bits only where rows are read, or where something else than a new model is trained on text: so
# the recipe of a run on text is the same with and without them.
ROWS = ("rows", "template", "packing", "truncate")
TUNE = tuple(name for name, f in FIELDS.items() if f.section == "tune")


def decides(config: "TrainConfig", name: str) -> bool:
    """Return whether field `name` decides the bits of a run of `config`, rather than speed or comfort."""
    if name in SPIKES:
        policy = config.optim.on_spike
        return policy == "rollback" or (policy == "skip" and name not in ROLLBACK)
    if name in ROWS:
        return config.tune.objective != "lm"
    if name in TUNE:
        return tuned(config)
    return not FIELDS[name].comfort


def tuned(config: "TrainConfig") -> bool:
    """Return whether a run of `config` is anything else than a new model that learns a text."""
    return config.tune.objective != "lm" or config.tune.base is not None


def flag(name: str) -> str:
    """Return the flag of a field: max_lr -> --max-lr; of `base`, --from."""
    return "--from" if name == "base" else "--" + name.replace("_", "-")


def _typed(f: Field, value: Any, where: str) -> Any:
    """Return `value` as field `f` holds it. Raises UsageError, naming `where`, on a wrong type or value."""
    if value is None and f.optional:
        return None
    if f.name in SEEDS:
        return parse_seed(value, where)
    if f.kind is tuple:
        value = (value,) if isinstance(value, str | Path) else value
        if not isinstance(value, list | tuple) or not all(isinstance(v, str | Path) and str(v) for v in value):
            raise UsageError(f"{where}: {value!r} is not a path or a list of paths")
        return tuple(str(v) for v in value)
    if f.kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        value = float(value)
    if not isinstance(value, f.kind) or (f.kind is not bool and isinstance(value, bool)):
        noun = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[f.kind]
        raise UsageError(f"{where}: {value!r} is not {noun}")
    if f.choices and value not in f.choices:
        raise UsageError(f"{where}: {value!r} is not one of {', '.join(f.choices)}")
    if isinstance(value, int | float) and f.kind is not bool:
        if not math.isfinite(value):
            raise UsageError(f"{where}: {value!r} is not a finite number")
        if f.low is not None and value < f.low:
            raise UsageError(f"{where}: {value!r} is too small; the least is {f.low:g}")
        if f.high is not None and value > f.high:
            raise UsageError(f"{where}: {value!r} is too large; the most is {f.high:g}")
        if f.below is not None and value >= f.below:
            raise UsageError(f"{where}: {value!r} is too large; it must be below {f.below:g}")
    return value


def from_dict(tree: Mapping[str, Any], where: str) -> TrainConfig:
    """Return the config that `tree` (sections of keys) sets over the defaults.

    Raises UsageError naming `where`, the section and the key for anything unknown, of a wrong type or out of bounds.
    """
    sections = {f.name: f for f in dataclasses.fields(TrainConfig)}
    built: dict[str, Any] = {}
    for section, keys in tree.items():
        if section not in sections:
            hint = f"; it belongs under [{FIELDS[section].section}]" if section in FIELDS else ""
            raise UsageError(f"{where}: unknown key {section!r}{hint}. Sections: {', '.join(sections)}")
        if not isinstance(keys, Mapping):
            raise UsageError(f"{where}: [{section}] must be a table of keys")
        for key in keys:
            if key not in FIELDS or FIELDS[key].section != section:
                hint = f"; it belongs under [{FIELDS[key].section}]" if key in FIELDS else ""
                raise UsageError(f"{where}: unknown key {key!r} in [{section}]{hint}")
        cls: Any = sections[section].type
        built[section] = cls(**{k: _typed(FIELDS[k], v, f"{where}: [{section}] {k}") for k, v in keys.items()})
    return TrainConfig(**built)


def from_toml(path: str | Path) -> TrainConfig:
    """Read a TOML file of sections and keys. Raises UsageError if it cannot be read, parsed or understood."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        return from_dict(tomllib.loads(text), str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot read the config ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None


def to_toml(config: TrainConfig) -> str:
    """Return the config as TOML that from_toml() reads back to the same config. Unset optional values are left out."""
    lines: list[str] = []
    for section, keys in config.as_dict().items():
        lines += [f"[{section}]"] + [f"{k} = {_toml_value(v)}" for k, v in keys.items() if v is not None] + [""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def value(config: TrainConfig, name: str) -> Any:
    """Return the value of a field."""
    return getattr(getattr(config, FIELDS[name].section), name)


def differences(a: TrainConfig, b: TrainConfig, rolled_back: bool = False) -> list[tuple[str, Any, Any]]:
    """Return (name, value in a, value in b) for each field that decides bits and differs.

    After a rollback the learning rate goes by the settings of rollbacks, whatever the policy is since then (in a fork).
    """
    return [
        (name, x, y)
        for name, f in FIELDS.items()
        if (decides(a, name) or decides(b, name) or (rolled_back and name in ROLLBACK))
        and (x := getattr(getattr(a, f.section), name)) != (y := getattr(getattr(b, f.section), name))
    ]
