"""The states of a run on the device: before step 1, and of its checkpoints, over the frozen base of adapters."""

import mlx.core as mx
import numpy as np

from mlxdet.config import TrainConfig
from mlxdet.errors import UsageError
from mlxdet.model import gpt, lora
from mlxdet.training import base, checkpoint
from mlxdet.training.checkpoint import Snapshot
from mlxdet.training.run import Run
from mlxdet.training.step import State, fresh_state, initial_state
from mlxdet.tuning import parse_targets


class States:
    """Makes states of one run. `frozen`: the base on the device; empty without LoRA."""

    def __init__(self, run: Run, config: TrainConfig, vocab: int):
        """Raises UsageError if the base is not, to the bit, what the run was started from."""
        self.run, self.config, self.vocab = run, config, vocab
        self.frozen = _placed(base.load(run)) if config.tune.lora_rank else {}

    def initial(self) -> State:
        """Return the state before step 1."""
        if self.run.base is None:
            return initial_state(self.config, self.vocab)
        if not self.frozen:
            return fresh_state(_placed(base.load(self.run)))
        t, shapes = self.config.tune, gpt.shapes(self.config.model, self.vocab)
        assert self.config.seeds.init_seed is not None
        adapters = lora.init(shapes, t.lora_rank, parse_targets(t.lora_targets), self.config.seeds.init_seed)
        return fresh_state(_placed(adapters), self.frozen)

    def of(self, saved: Snapshot) -> State:
        """Return the state of a checkpoint. Raises UsageError unless it fits the model and the base."""
        where = checkpoint.directory(self.run.checkpoints, saved.step)
        if saved.base != (self.run.base if self.frozen else None):
            raise UsageError(f"{where}: its adapters were trained on another base (digest {saved.base})")
        want = trained_shapes(self.config, self.vocab)
        have = {k: tuple(w.shape) for k, w in saved.weights.items()}
        if want != have:
            odd = [f"{k}: {have.get(k, 'missing')} instead of {want.get(k, 'nothing')}" for k in sorted(want | have)
                   if want.get(k) != have.get(k)]  # fmt: skip
            raise UsageError(f"{where}: the checkpoint does not fit the model: {'; '.join(odd[:5])}")
        return State.of(saved, self.frozen)

    def base(self) -> gpt.Weights:
        """Return the weights that the run was started from, on the device."""
        return self.frozen or _placed(base.load(self.run))


def trained_shapes(config: TrainConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that is trained, by name, in name order: of all, or of the adapters alone."""
    shapes, t = gpt.shapes(config.model, vocab), config.tune
    return lora.shapes(shapes, t.lora_rank, parse_targets(t.lora_targets)) if t.lora_rank else shapes


def _placed(weights: dict[str, np.ndarray]) -> gpt.Weights:
    return {name: mx.array(w) for name, w in weights.items()}
