"""Text from a run on disk: its checkpoint, its tokenizer, and a seed of its own."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mlxdet import backends
from mlxdet.data.templates import Renderer, Turn
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
    ask: bool = False,
) -> Iterator[str]:
    """Yield pieces of the text that the run's model writes after `prompt` (the prompt not included).

    With `ask` the prompt is what a user says, written in the run's template, and the text ends where the answer does.
    The checkpoint is `step`'s, or the newest. Raises UsageError for an empty prompt, an unusable seed or temperature, a
    run without a checkpoint, a run on text that is asked, or a tokenizer that is not the run's.
    """
    run = run if isinstance(run, Run) else Run(run)
    draws = Splitmix64(stream(parse_seed(seed), "generate"))
    if not math.isfinite(temperature) or temperature < 0:
        raise UsageError(f"--temperature: {temperature} must be a finite number from 0 up")
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    if tokenizer.digest != run.manifest["corpus"].get("tokenizer", {}).get("digest", ""):
        raise UsageError(f"{run.config.data.tokenizer}: not the tokenizer that {run.path} was trained with")
    end: list[int] = []
    if not prompt:
        raise UsageError(f"--{'ask' if ask else 'prompt'}: give at least one character to go on from")
    if ask:
        if run.config.tune.objective == "lm":
            raise UsageError(f"--ask: {run.path} was trained on text, so it has no template; use --prompt")
        renderer = Renderer(run.config.data.template, tokenizer)
        turns = [Turn("user", prompt)]
        if renderer.spells_marker(turns):
            raise UsageError(f"--ask: the text spells a marker of the template {renderer.template.name}")
        ids, end = renderer.prompt(turns).tolist(), renderer.end
        if len(ids) >= (context := run.config.model.context or 0):
            raise UsageError(f"--ask: {len(ids)} tokens with the template; a context of {context} leaves no answer")
    else:
        ids = tokenizer.encode(prompt).tolist()
    complete = completer(run, step, temperature=temperature, top_k=top_k, rng=draws)
    return _pieces(tokenizer, until(complete(ids, tokens), end))


def completer(
    run: Run, step: int | None = None, *, temperature: float = 0.0, top_k: int = 0, rng: Splitmix64 | None = None
) -> Callable[[Sequence[int] | np.ndarray, int], Iterator[int]]:
    """Return a function (ids, n): the n ids that the run's model goes on with, as an iterator.

    `step`: of the checkpoint, default the newest; 0 means the weights before the first step. `rng`: where draws come
    from (none are made at temperature 0). Raises UsageError if there is no such checkpoint.
    """
    backend = backends.activate(run.config.loop.device, run.config.loop.kernels)
    from mlxdet.model.generate import generate
    from mlxdet.training.states import States
    from mlxdet.training.step import TrainStep

    step_fn = TrainStep(run.config, run.manifest["corpus"]["vocab"], backend)
    states = States(run, run.config, step_fn.vocab)
    model = step_fn.model(states.initial() if step == 0 else states.of(run.load(step)))
    draws = rng or Splitmix64(stream(0, "generate"))

    def complete(ids: Sequence[int] | np.ndarray, tokens: int) -> Iterator[int]:
        prompt = [int(i) for i in ids]
        return generate(model, run.config.model, step_fn.ops, step_fn.dtype, prompt, tokens,
                        temperature=temperature, top_k=top_k, rng=draws)  # fmt: skip

    return complete


def until(ids: Iterator[int], end: Sequence[int]) -> Iterator[int]:
    """Yield ids up to the first place where they spell `end`, without it; all of them if it is empty or never comes."""
    held: list[int] = []  # the longest tail that may become `end`
    for token in ids:
        held.append(token)
        if end and held == [*end]:
            return
        while held and held != [*end[: len(held)]]:
            yield held.pop(0)
    yield from held


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
