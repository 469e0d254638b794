"""The kinds of run every promise is kept for, and how two runs are compared."""

from pathlib import Path

STEPS = 24
BASE = "--preset nano --layers 1 --width 32 --mlp 64 --context 32 --batch 4 --steps 24 --seed 7 --max-lr 3e-3 --val-windows 8"
FAMILIES = {
    "base": "",
    "dropout": "--dropout 0.1",
    "accumulation": "--accumulation 3 --batch 3",
    "bfloat16": "--dtype bfloat16",
    "sentencepiece": "--tokenizer {model}",
    "epochs": "--order epochs",
    "everything": "--dropout 0.1 --accumulation 3 --dtype bfloat16 --tokenizer {model} --order epochs --neftune-alpha 5 "
    "--schedule wsd",
    "default kernels": "--kernels default",
}


def arguments(family: str, text: Path, model: Path) -> list[str]:
    """Return the flags of a family, ready for `mlxdet train`."""
    flags = FAMILIES[family].format(model=model)
    base = BASE if "--batch" not in flags else BASE.replace("--batch 4", "")
    return [*base.split(), *flags.split(), "--data", str(text), "--device", "cpu"]


def contents(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """Return the bytes of all that must be the same in two equal runs."""
    files = [run / "metrics.jsonl", *(run / "checkpoints" / f"{step:08d}").iterdir()]
    return {f.name: f.read_bytes() for f in files}


def differing(a: Path, b: Path, step: int = STEPS) -> list[str]:
    """Return which files differ between two runs."""
    x, y = contents(a, step), contents(b, step)
    assert len(x) == 4
    return sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k))
