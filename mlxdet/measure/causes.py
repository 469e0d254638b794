"""Why two runs may part for a reason outside their numbers: what their manifests say differently.

A difference is listed with whether it decides bits at all (comfort does not), and whether it can be the reason for a
first difference in a given stage: another BLAS cannot choose other rows, another order of the data can.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxdet import config as configs
from mlxdet.config import FIELDS, SEEDS, SPIKES
from mlxdet.errors import UsageError
from mlxdet.training.provenance import environment_differences, flat

# Settings that reach nothing but the rows of a batch, and nothing but the learning rate. Rows, batches and learning
# rates are logged at each step, so if these are equal such a setting has had no effect up to there.
ROWS = {"order", "val_fraction", "batch", "accumulation", "context", "data_seed", "packing"}
VALIDATED = {"val_fraction", "batch", "context"}  # of these, what also reaches the validation
SCHEDULE = {"steps", "schedule", "max_lr", "min_lr", "warmup", "decay_steps", "decay_shape"}
DATA_STAGES = ("rows", "batch")
# Of the manifest: what follows from the rest. Of a base its digest counts, not where it came from.
DERIVED = {"format", "recipe", "argv", "train_tokens", "val_tokens", "train_rows", "val_rows", "parameters",
           "trainable", "base"}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """One thing that differs: `kind` is seed, config, corpus, tokenizer, code, environment, resume or manifest.

    Seeds that differ in the same way are one thing, their names joined by commas.
    """

    kind: str
    name: str
    a: Any
    b: Any
    decides: bool

    def explains(self, stage: str | None) -> bool:
        """Return whether this can make `stage` the first that differs (None: nothing differs)."""
        if not self.decides or stage is None:
            return False
        if self.name in SPIKES:  # what follows a spike can be other rows, another learning rate, a withheld update
            return True
        if stage == "records":  # a record lost in the middle of a log
            return False
        if stage == "length":
            return self.name == "steps" or self.kind == "manifest"
        if self.kind in ("code", "manifest"):
            return True
        names = {*self.name.split(", ")}
        if stage in DATA_STAGES:
            return self.kind in ("corpus", "tokenizer") or bool(names & ROWS)
        if stage == "lr":
            return bool(names & SCHEDULE)
        if stage == "validation" and (self.kind == "corpus" or names & VALIDATED):
            return True
        # Forward, backward, update. Text and rows are held equal by the digest of the batch.
        return self.kind in ("environment", "resume", "tokenizer") or (
            self.kind in ("seed", "config") and bool(names - ROWS - SCHEDULE)
        )

    def as_dict(self, stage: str | None) -> dict[str, Any]:
        return asdict(self) | {"explains": self.explains(stage)}


def causes(a: dict[str, Any], b: dict[str, Any]) -> list[Cause]:
    """Return what differs between two manifests, what decides bits first."""
    found = [*_config(a, b), *_corpus(a, b), *_code(a, b), *_environment(a, b)]
    # Forked off a run of the other's recipe: whatever was changed there stands in the config.
    kin = any(
        (x.get("forked") or {}).get("recipe") == y.get("recipe") and "forked" not in y for x, y in ((a, b), (b, a))
    )
    left = DERIVED | {"config", "corpus", "code", "environment"} | ({"forked"} if kin else set())
    one, other = ((m.get("base") or {}).get("digest") for m in (a, b))
    found += [Cause("manifest", "base.digest", one, other, True)] if one != other else []
    for name in sorted((a.keys() | b.keys()) - left):
        x, y = flat(a.get(name), name), flat(b.get(name), name)
        found += [Cause("manifest", k, p, q, True) for k, p, q in _differing(x, y)]
    return sorted(found, key=lambda cause: not cause.decides)


def _differing(x: dict[str, Any], y: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(k, x.get(k), y.get(k)) for k in dict.fromkeys((*x, *y)) if x.get(k) != y.get(k)]


def _telling(name: str) -> int:
    """Return the rank of a name by how much its value tells people: names of things first, digests last."""
    return {"name": 0, "files": 0, "digest": 2}.get(name.rpartition(".")[2], 1)


def _config(a: dict[str, Any], b: dict[str, Any]) -> list[Cause]:
    """Compare resolved configs as they stand in the manifests, so that those of other versions can be read too: a
    setting that this version does not know is taken to decide."""
    x, y = ({k: v for section in m["config"].values() for k, v in section.items()} for m in (a, b))
    differ = _differing(x, y)
    seeds: dict[tuple[Any, Any], list[str]] = {}
    for name, p, q in differ:
        if name in SEEDS:
            seeds.setdefault((p, q), []).append(name)  # --seed is followed by those that were not given
    found = [Cause("seed", ", ".join(names), p, q, True) for (p, q), names in seeds.items()]
    return found + [
        Cause("config", name, p, q, name != "base" and any(_decides(m["config"], name) for m in (a, b)))
        for name, p, q in differ
        if name not in SEEDS
    ]


def _decides(config: dict[str, Any], name: str) -> bool:
    if name not in FIELDS:
        return True
    try:
        return configs.decides(configs.from_dict(config, "run.json"), name)
    except UsageError:  # of another version
        return not FIELDS[name].comfort


def _corpus(a: dict[str, Any], b: dict[str, Any]) -> list[Cause]:
    x, y = (dict(m["corpus"]) for m in (a, b))
    other = x.get("digest") != y.get("digest")  # of the tokens, so of text and tokenizer; names are comfort
    for corpus in (x, y):
        names = [Path(str(file.get("name"))).name for file in corpus.pop("files", [])]
        corpus["files"] = ", ".join(names[:5] + ["..."] * (len(names) > 5))
    found = sorted(_differing(flat(x), flat(y)), key=lambda d: _telling(d[0]))
    tokenizer = ("tokenizer", "kind", "vocab")
    return [Cause("tokenizer" if k.startswith(tokenizer) else "corpus", k, p, q, other) for k, p, q in found]


def _code(a: dict[str, Any], b: dict[str, Any]) -> list[Cause]:
    x, y = a.get("code") or {}, b.get("code") or {}
    other = x.get("source") != y.get("source")  # the digest of mlxdet's own files: commit and dirty mark follow it
    return [Cause("code", k, p, q, other) for k, p, q in _differing(x, y)]


def _environment(a: dict[str, Any], b: dict[str, Any]) -> list[Cause]:
    x, y = a["environment"], b["environment"]
    differ = sorted(environment_differences(x, y), key=lambda d: _telling(d[0]))
    decisive = [Cause("environment", k, p, q, True) for k, p, q in differ]
    notes = _differing(flat(x.get("notes", {})), flat(y.get("notes", {})))
    return decisive + [Cause("environment", k, p, q, False) for k, p, q in notes]
