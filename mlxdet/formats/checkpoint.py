"""What every reader returns: the tensors of a checkpoint, and apart from them everything else its files say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxdet.formats.tensor import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, opened and proven whole.

    `tensors` are in name order. What identifies two models as the same is in `tensors` alone; `metadata` holds what the
    files say besides (ids, times, hyperparameters, counters of an optimizer), as plain values that JSON can hold.

    `notes` are sentences for the reader of a report. `unread` names what holds data that could not be turned into
    tensors (a sparse tensor, an object of an unknown class): such things are reported, never guessed, and two
    checkpoints that have any have not been compared in full. `tied` are groups of names that are one and the same piece
    of the file.
    """

    path: Path
    format: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    def verify(self) -> None:
        """Read every byte and check every checksum the format carries. Raises FormatError at the first that fails.

        Reading a tensor checks what it reads, so this is only for those who want the proof without the tensors.
        """
        for tensor in self.tensors.values():
            _ = tensor.data


def by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` in name order."""
    return {name: tensors[name] for name in sorted(tensors)}
