"""One training step repeated from one state: is it the same each time, and if not, which tensors moved?

Two repetitions prove little, as a race that flips one time in thirty passes most pairs: the default is 20.
"""

import hashlib
from typing import Any

import numpy as np

from mlxdet.config import tuned
from mlxdet.errors import UsageError
from mlxdet.training.run import Run


def repeat_step(run: Run, n: int = 20) -> dict[str, Any]:
    """Repeat the step after the newest checkpoint of `run` (its first step, if it has none) n times.

    Returns {"n", "identical": how many repetitions equalled the first, itself included, "moved": names of what ever
    differed, out of "loss", "grad_norm", "gradient.<weight>", "weight.<weight>", "m.<weight>", "v.<weight>"}.
    """
    from mlxdet import backends
    from mlxdet.training.corpora import open_data

    corpus, batches = open_data(run)
    backend = backends.activate(run.config.loop.device, run.config.loop.kernels)
    import mlx.core as mx

    from mlxdet.training.step import State, TrainStep, initial_state

    if tuned(run.config):
        raise UsageError(f"{run.path}: repeat-step is for new models on text")
    step = TrainStep(run.config, corpus.vocab_size, backend)
    state = State.of(run.load()) if run.steps() else initial_state(run.config, corpus.vocab_size)
    batch = batches.batch(state.step + 1)
    tokens = mx.array(batch.tokens[0])
    first: dict[str, str] = {}
    identical, moved = 0, set()
    for _ in range(n):
        after, outcome = step(state, batch)
        _, grads = mx.compile(step.gradient)(state.weights, tokens, step.keys(batch.step, 0))
        saved = after.snapshot()
        arrays = {"loss": np.array(outcome.loss), "grad_norm": np.array(outcome.grad_norm)}
        arrays |= {f"gradient.{k}": np.array(v) for k, v in grads.items()}
        for kind, tree in (("weight", saved.weights), ("m", saved.first), ("v", saved.second)):
            arrays |= {f"{kind}.{k}": v for k, v in tree.items()}
        digests = {k: hashlib.blake2b(v.tobytes()).hexdigest() for k, v in arrays.items()}
        first = first or digests
        differ = {k for k in digests if digests[k] != first[k]}
        identical += not differ
        moved |= differ
    return {"n": n, "identical": identical, "moved": sorted(moved)}
