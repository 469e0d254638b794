"""What must not matter to a training, changed on purpose: one kind at a time, so that a difference has one cause.

The values are fixed: a second run of the same gate perturbs in the same way.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxdet.errors import UsageError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
SCHEDULE = {"MLX_MAX_OPS_PER_BUFFER": ("2", "7"), "MLX_MAX_MB_PER_BUFFER": ("2", "7"), "MLX_BFS_MAX_WIDTH": ("3", "7")}
KINDS = {
    "hash": "PYTHONHASHSEED, which decides the order of Python's sets",
    "threads": ", ".join(THREADS),
    "schedule": ", ".join(SCHEDULE) + ": when MLX hands work to the device",
    "locale": "TZ, LC_ALL",
}


@dataclass(frozen=True)
class Setting:
    """The variables of one repetition: `kind` names what was changed ("" for nothing)."""

    kind: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())


def settings(kinds: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[Setting, list[Setting]]:
    """Return (the setting of the unperturbed repetitions, one setting per perturbation).

    `kinds` are names of KINDS, "all", or VARIABLE=VALUE, each possibly several with commas. Where the hash seed is
    perturbed and not set, the unperturbed repetitions get one too: Python would draw another for each. Raises
    UsageError for an unknown kind, or a VARIABLE that has that VALUE already.
    """
    asked: list[str] = []
    for item in kinds:
        words = [item] if "=" in item else [word.strip() for word in item.split(",")]
        asked += [kind for word in words for kind in (KINDS if word == "all" else [word]) if kind not in asked]
    base: dict[str, str] = {}
    perturbed: list[Setting] = []
    for kind in asked:
        name, equals, value = kind.partition("=")
        if equals and name:
            if environment.get(name) == value:
                raise UsageError(f"--perturb: {name} is {value!r} already, so nothing would change")
            perturbed.append(Setting(name, {name: value}))
        elif kind == "hash":
            seed = environment.get("PYTHONHASHSEED", "random")
            if not seed.isdecimal():
                seed = base["PYTHONHASHSEED"] = "0"
            # Two, as a small set can come out in the same order with another seed.
            perturbed += [Setting("hash", {"PYTHONHASHSEED": str((int(seed) + i) % 2**32)}) for i in (1, 2)]
        elif kind == "threads":
            cores = str(os.cpu_count() or 1)
            chosen = {name: "1" if environment.get(name, cores) != "1" else "2" for name in THREADS}
            perturbed.append(Setting("threads", chosen))
        elif kind == "schedule":
            chosen = {name: a if environment.get(name) != a else b for name, (a, b) in SCHEDULE.items()}
            perturbed.append(Setting("schedule", chosen))
        elif kind == "locale":
            # A zone with an odd offset; C is the one locale that every system has.
            zone = "Asia/Kathmandu" if environment.get("TZ") != "Asia/Kathmandu" else "UTC"
            tongue = "C" if environment.get("LC_ALL") != "C" else "C.UTF-8"
            perturbed.append(Setting("locale", {"TZ": zone, "LC_ALL": tongue}))
        else:
            raise UsageError(f"--perturb: unknown {kind!r}; there are {', '.join(KINDS)}, all, and VARIABLE=VALUE")
    return Setting("", base), perturbed
