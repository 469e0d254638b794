"""Where the weights of two runs part, as far as checkpoints that both hold can tell, and what that says of the log.

Tensors are named in three groups. A first moment moves with the gradient of its step, so moved first moments point at
the backward pass; moments that agree beside weights that do not point at the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxdet.formats import Checkpoint, FormatError, open_checkpoint
from mlxdet.formats.source import bare
from mlxdet.measure.compare import Comparison, TensorDifference, compare
from mlxdet.measure.parting import First
from mlxdet.training import checkpoint

PREFIX = "optimizer."  # of the optimizer's tensors in an opened checkpoint
LABELS = {
    "rows": "rows of the batch",
    "batch": "content of the batch",
    "loss": "loss (forward)",
    "grad_norm": "gradient norm (backward)",
    "lr": "learning rate (schedule)",
    "skipped": "whether the update was made",
    "weights": "weights (update)",
    "validation": "validation loss",
}


@dataclass(frozen=True)
class CheckpointPair:
    """The checkpoint of one step in both runs: weights and the optimizer's tensors, compared apart.

    `detour` counts the rollbacks before it, as the log does: the steps of a detour come after those it went back over.
    """

    step: int
    weights: Comparison
    optimizer: Comparison
    detour: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies in the order of the log."""
        return self.detour, self.step

    @property
    def identical(self) -> bool:
        return self.weights.identical and self.optimizer.identical

    @property
    def moved(self) -> list[tuple[str, TensorDifference]]:
        """(group, tensor) of what moved: first moments, second moments, other state, weights; each worst first."""
        groups: dict[str, list[TensorDifference]] = {"first moments": [], "second moments": [], "optimizer": []}
        for tensor in self.optimizer.moved:
            end = tensor.name.rpartition(".")[2]
            groups[{"m": "first moments", "v": "second moments"}.get(end, "optimizer")].append(tensor)
        groups["weights"] = self.weights.moved
        return [(group, tensor) for group, tensors in groups.items() for tensor in tensors]

    def tensors(self) -> list[dict[str, Any]]:
        """Return what moved, for JSON."""
        return [
            {"name": t.name.removeprefix(PREFIX), "group": group, "relFro": t.relfro, "max_abs": t.max_abs,
             "differing": t.differing, "slots": t.slots} for group, t in self.moved
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        parts = {
            name: {"verdict": c.verdict, "reason": c.reason, "relFro": c.total.relfro, "tensors": len(c.tensors),
                   "missing": c.missing, "extra": c.extra, "reshaped": [n for n, _, _ in c.reshaped]}
            for name, c in (("weights", self.weights), ("optimizer", self.optimizer))
        }  # fmt: skip
        return {"step": self.step, "detour": self.detour, "identical": self.identical, **parts, "moved": self.tensors()}


def spell(place: tuple[int, int]) -> str:
    """Return a place in the order of the log as the log's keys are read."""
    detour, step = place
    return f"detour {detour}, step {step}" if detour else f"step {step}"


def pair(a: Path, b: Path, step: int) -> CheckpointPair | None:
    """Compare the checkpoints of `step` of two runs, None if they are not of the same branch or one is gone by now.

    Raises FormatError if one of them is damaged.
    """
    places = [checkpoint.directory(path / "checkpoints", step) for path in (a, b)]
    try:
        opened = [open_checkpoint(place) for place in places]
    except FormatError:
        if all((place / checkpoint.STATE).exists() for place in places):
            raise
        return None  # a run that goes on has removed it (--keep)
    detours = [len(c.metadata.get("detours", ())) for c in opened]  # type: ignore[arg-type]
    if detours[0] != detours[1]:
        return None

    def part(c: Checkpoint, optimizer: bool) -> Checkpoint:
        tensors = {n: t for n, t in c.tensors.items() if n.startswith(PREFIX) == optimizer}
        return replace(c, tensors=tensors, metadata={})

    weights, state = (compare(*(part(c, optimizer) for c in opened)) for optimizer in (False, True))
    return CheckpointPair(step, weights, state, detours[0])


def seen_before(pairs: Sequence[CheckpointPair], step: int, detour: int = 0) -> tuple[bool, str]:
    """Return whether the state that `step` starts from is known to be the same, and what is known, in words."""
    last = next((p.step for p in reversed(pairs) if p.identical and p.place < (detour, step)), None)
    if last == step - 1:
        return True, f"weights and moments before it (checkpoint {last}) are identical"
    if last is not None:
        steps = f"steps {last + 1} to {step - 1}" if last + 1 < step - 1 else f"step {last + 1}"
        unseen = f"the update of {steps} may have moved them without a trace in the log"
        return False, f"weights were last seen identical at checkpoint {last}: {unseen}"
    if step == 1:
        return False, "initial weights are not saved and may have differed"
    return False, "no checkpoint before it is in both runs: the weights may have parted at any earlier step"


def read_logged(first: First, pairs: Sequence[CheckpointPair]) -> First:
    """Return the first logged difference with what checkpoints add to it."""
    assert first.step is not None
    certain, seen = seen_before(pairs, first.step, first.detour)
    here = next((p for p in pairs if p.place == first.place and not p.identical), None)
    first = replace(first, tensors=here.tensors() if here else [])
    if first.stage == "rows":
        return replace(first, reading="other windows were chosen")
    if first.stage == "batch":
        return replace(first, reading="the same rows hold other tokens: another text or tokenizer")
    if first.stage == "lr":
        return replace(first, reading="same gradient norm, another learning rate: the schedule")
    if first.stage == "loss":
        return replace(first, reading=f"same rows and batch, another loss: the forward pass; {seen}", certain=certain)
    if first.stage == "grad_norm":
        most = f"; moved most by step {first.step}: {worst(first.tensors)}" if first.tensors else ""
        reading = f"same loss, another gradient norm: the backward pass; {seen}{most}"
        return replace(first, reading=reading, certain=certain)
    return first


def read_moved(moved: CheckpointPair, pairs: Sequence[CheckpointPair]) -> First:
    """Return the first difference where checkpoint `moved` differs and nothing logged up to its step does."""
    last = next((p.step for p in reversed(pairs) if p.place < moved.place), None)
    tensors = moved.tensors()
    start = "weights still identical" if last is not None else "no earlier checkpoint is in both runs"
    text = f"{start}{f' at checkpoint {last}, differ' if last is not None else ', weights differ'} at {moved.step}"
    text += ", while all that was logged up to there is the same: "
    if moved.step - (last or 0) > 1:
        text += f"an update of steps {(last or 0) + 1} to {moved.step}"
    elif not tensors:
        text += "the two hold other tensors"
    elif tensors[0]["group"] == "first moments":
        text += "the gradient differs (first moments moved) though its logged norm does not, so the backward pass"
    else:
        text += "the first moments are identical, so the gradient is, and the update itself differs"
    if last is None:
        text += ", if the initial weights, which are not saved, were the same"
    if tensors:
        text += f"; moved most: {worst(tensors)}"
    certain = last is not None and moved.step - last == 1
    return First(spell(moved.place), moved.step, "weights", LABELS["weights"], text, certain, {}, tensors, moved.detour)


def worst(tensors: Sequence[dict[str, Any]]) -> str:
    """Name the first few of the first group that moved."""
    group = [t for t in tensors if t["group"] == tensors[0]["group"]]
    named = [bare(t["name"]) + (f" (relFro {t['relFro']:.1e})" if t["relFro"] is not None else "") for t in group[:3]]
    more = f" and {len(group) - 3} more" if len(group) > 3 else ""
    return f"{tensors[0]['group']} of {', '.join(named)}{more}"
