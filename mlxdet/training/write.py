"""Text from a run on disk: its checkpoint, its tokenizer, and a seed of its own."""

import math
from collections.abc import Iterator
from pathlib import Path

from mlxdet import backends
from mlxdet.data.tokenizer import Tokenizer, load_tokenizer
from mlxdet.errors import UsageError
from mlxdet.seeds import Splitmix64, parse_seed, stream
from mlxdet.training.run import Run


def write(
    run: Run | str | Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int | str = 0,
    step: int | None = None,
) -> Iterator[str]:
    """Yield pieces of the text that the run's model writes after `prompt` (the prompt not included).

    The checkpoint is `step`'s, or the newest. Raises UsageError for an empty prompt, an unusable seed or temperature, a
    run without a checkpoint, or a tokenizer that is not the one the run was trained with.
    """
    run = run if isinstance(run, Run) else Run(run)
    draws = Splitmix64(stream(parse_seed(seed), "generate"))
    if not math.isfinite(temperature) or temperature < 0:
        raise UsageError(f"--temperature: {temperature} must be a finite number from 0 up")
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    if tokenizer.digest != run.manifest["corpus"].get("tokenizer", {}).get("digest", ""):
        raise UsageError(f"{run.config.data.tokenizer}: not the tokenizer that {run.path} was trained with")
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        raise UsageError("--prompt: give at least one character to go on from")
    backend = backends.activate(run.config.loop.device, run.config.loop.kernels)
    from mlxdet.model.generate import generate
    from mlxdet.model.ops import ops_for
    from mlxdet.training.step import DTYPES, State

    state = State.of(run.load(step))
    stream_of_ids = generate(
        state.weights, run.config.model, ops_for(backend), DTYPES[run.config.model.dtype], ids, tokens,
        temperature=temperature, top_k=top_k, rng=draws,
    )  # fmt: skip
    return _pieces(tokenizer, stream_of_ids)


def _pieces(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Decode ids as they come; a character whose bytes are not all there yet waits for the rest of them."""
    so_far: list[int] = []
    shown = ""
    for token in ids:
        so_far.append(token)
        text = tokenizer.decode(so_far)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(so_far)[len(shown) :]
