"""What determinism costs on a device: the time of a step with deterministic kernels over that with MLX's own.

One process for each kind of kernels, as some settings are read once. They live side by side and take turns of a few
steps (A B, B A, ...), so that what else the machine does weighs on both alike. A turn's time is the median of its
steps; the ratio is taken between the two turns of a round, and the median over the rounds is reported with the 95 %
interval of that median. `python -m mlxdet.measure.device_cost DEVICE KERNELS` is one of the two; it answers a line of
JSON for each line it reads.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from mlxdet.measure.device_worker import MARK

WARM, TURN = 3, 8  # steps before the first turn of a model, and of one turn; fewer where a step is slow
BATCH = 16
LEAST_ROUNDS, MOST_ROUNDS = 3, 20


@dataclass(frozen=True)
class Case:
    """A model to time. Up to 1,024 ids the embedding gradient is a one-hot product, above it is fixed point."""

    preset: str
    dtype: str
    vocab: int = 256

    def __str__(self) -> str:
        return f"{self.preset}, {self.dtype}" + ("" if self.vocab == 256 else f", {self.vocab} ids")


CASES = (
    *(Case(preset, dtype) for preset in ("nano", "tiny", "small") for dtype in ("float32", "bfloat16")),
    *(Case("small", dtype, 32_000) for dtype in ("float32", "bfloat16")),
)


class Arm:
    """In the child: steps of one case after the other."""

    def __init__(self, device: str, kernels: str):
        from mlxdet import backends

        self.backend = backends.activate(device, kernels)
        self.case: Case | None = None

    def turn(self, case: Case, steps: int) -> list[float]:
        """Return the seconds of each of `steps` steps; a case starts with its first turn, which compiles."""
        import mlx.core as mx
        import numpy as np

        from mlxdet.config import TrainConfig
        from mlxdet.data.batches import Batch
        from mlxdet.training.step import TrainStep, initial_state

        if case != self.case:
            config = TrainConfig.of(preset=case.preset, dtype=case.dtype, batch=BATCH, kernels=self.backend.kernels)
            config = config.resolve()
            assert config.model.context
            shape = (1, BATCH, config.model.context + 1)
            self.tokens = np.random.default_rng(0).integers(0, case.vocab, shape).astype(np.int32)
            self.step = TrainStep(config, case.vocab, self.backend)
            self.state, self.case = initial_state(config, case.vocab), case
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            batch = Batch(self.state.step + 1, self.tokens, np.zeros(BATCH, np.int64), "")
            self.state, outcome = self.step(self.state, batch)
            mx.eval(self.state.arrays(), outcome.loss, outcome.grad_norm)
            seconds.append(time.perf_counter() - began)
        if not np.isfinite(outcome.loss.item()):
            raise FloatingPointError(f"{case}: the loss is {outcome.loss.item()}")
        return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Return the median with its 95 % interval, from order statistics: no assumption on the form of the noise."""
    ordered, n = sorted(values), len(values)
    rank = max(0, int((n - 1.96 * n**0.5) / 2))
    return {"median": statistics.median(ordered), "low": ordered[rank], "high": ordered[n - 1 - rank]}


def main() -> None:
    """Answer requests for turns until stdin ends."""
    from mlxdet.errors import MlxdetError

    try:
        arm = Arm(*sys.argv[1:3])
    except MlxdetError as error:
        print(f"mlxdet: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any] = {"seconds": arm.turn(Case(**question["case"]), question["steps"])}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
