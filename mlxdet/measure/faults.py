"""Planted faults: each breaks one promise on purpose, so that the check that guards it can be seen to fail.

`python -m mlxdet.measure.faults NAME VERB ...` plants the fault NAME in its process and runs the verb. Nothing else in
mlxdet imports this module.
"""

import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def race() -> None:
    """The embedding gradient adds in an order that differs at every call, as float atomics do."""
    from mlxdet.model import embedding

    def scrambled(ids: Any, grad: Any, vocab: int) -> Any:
        import mlx.core as mx

        order = mx.random.permutation(ids.shape[0], key=mx.array([_noise(32), _noise(32)], mx.uint32))
        # Added in bfloat16 steps of the shuffled order: a difference in order must reach the bits.
        return embedding.scatter(ids[order], grad[order], vocab)

    for name in embedding.METHODS:
        embedding.METHODS[name] = scrambled
    _uncompiled()


def _noise(bits: int) -> int:
    return random.SystemRandom().getrandbits(bits)


def _uncompiled() -> None:
    """Compile nothing: a compiled function would draw its noise once, when it is traced."""
    os.environ["MLX_DISABLE_COMPILE"] = "1"


def unseeded_batches() -> None:
    """Windows are picked by a generator that nobody seeded."""
    from mlxdet.data import batches

    batches.stream = lambda *args: _noise(64)


def one_seed() -> None:
    """Every seed gives the same run."""
    from mlxdet import config

    config.parse_seed = lambda value, flag="": 5


def hash_order() -> None:
    """The initial weights depend on the hash of a string."""
    from mlxdet.model import gpt

    whole = gpt.init
    gpt.init = lambda config, vocab, seed: whole(config, vocab, seed ^ (hash("weights") & 0xFFFF))


def evaluation_draws() -> None:
    """Each validation shifts the batches that follow, as a shared generator does."""
    from mlxdet.training import corpora, trainer

    class Shifted(corpora.TextBatches):
        shift = 0

        def batch(self, step: int, detour: int = 0) -> Any:
            return replace(super().batch(step + Shifted.shift, detour), step=step)

    whole = trainer.Trainer._validate

    def validate(self: Any) -> None:
        Shifted.shift += 1
        whole(self)

    corpora.TextBatches, trainer.Trainer._validate = Shifted, validate  # type: ignore[misc,method-assign]


def eager_workers() -> None:
    """With more than one batch ahead, batches come in pairs the wrong way round."""
    from mlxdet.training import trainer

    class Swapped(trainer.Prefetcher[Any]):
        def __init__(self, produce: Callable[[int], Any], start: int, stop: int, depth: int):
            def swapped(step: int) -> Any:
                return replace(produce(step + 1 if step % 2 else step - 1), step=step)

            super().__init__(swapped if depth > 1 else produce, start, stop, depth)

    trainer.Prefetcher = Swapped  # type: ignore[misc,assignment]


def forgotten_moments() -> None:
    """A resume takes the weights and starts the optimizer anew."""
    from mlxdet.training import checkpoint

    whole = checkpoint.load

    def load(*args: Any, **kwargs: Any) -> Any:
        saved = whole(*args, **kwargs)
        return replace(saved, first={k: v * 0 for k, v in saved.first.items()})

    checkpoint.load = load


def flip_bit(step: int, bit: int) -> None:
    """In step `step` a bit of the embedding's gradient is flipped, as by a bad memory, in the value it makes largest.

    Not in FAULTS: it needs MLX to be pinned already, and it is `mlxdet investigate` that finds it, not smoke.
    """
    import mlx.core as mx
    import numpy as np

    from mlxdet.model.gpt import TOKENS
    from mlxdet.training.step import TrainStep

    whole = TrainStep.begin

    def begin(self: Any, state: Any, batch: Any) -> Any:
        loss, grads = whole(self, state, batch)
        if batch.step == step:
            values = np.array(grads[TOKENS], order="C")  # a copy in row order, so that its flat view is itself
            bits = values.reshape(-1).view(np.uint32)
            worst = int(np.nan_to_num(np.abs((bits ^ np.uint32(1 << bit)).view(np.float32)), nan=np.inf).argmax())
            bits[worst] ^= np.uint32(1 << bit)
            grads = {**grads, TOKENS: mx.array(values)}
        return loss, grads

    TrainStep.begin = begin  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__.replace("_", "-"): f
    for f in (race, unseeded_batches, one_seed, hash_order, evaluation_draws, eager_workers, forgotten_moments)
}


if __name__ == "__main__":
    from mlxdet import backends
    from mlxdet.cli import main

    backends.activate("auto")  # some faults import MLX, and only before that can it be pinned
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
