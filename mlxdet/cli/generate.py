"""mlxdet generate."""

import sys

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--prompt", metavar="TEXT", help="Text to go on from.  [default: 'The ']")
@click.option("--ask", metavar="TEXT", help="Ask a run that was tuned on conversations, in its template.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), metavar="N", help="Tokens to write.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0), metavar="X",
              help="0: always the most likely token.")  # fmt: skip
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), metavar="K", help="0: all tokens.")
@click.option("--seed", default="0", show_default=True, metavar="N", help="Seed of the draws, apart from the run's.")
@click.option("--step", type=click.IntRange(1), metavar="N", help="Checkpoint to use. Default: the newest.")
@common
def generate(
    run: str, prompt: str | None, ask: str | None, tokens: int, temperature: float, top_k: int, seed: str,
    step: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Write text with a trained run. The same seed writes the same text.

    \b
    Example:
      mlxdet generate runs/book --prompt "It was" --temperature 0.7 --seed 3
      mlxdet generate runs/chat --ask "reverse: abc" --temperature 0
    """
    from mlxdet.errors import UsageError
    from mlxdet.training.write import write

    if prompt is not None and ask is not None:
        raise UsageError("--ask does not go together with --prompt")
    text = ask if ask is not None else "The " if prompt is None else prompt
    pieces = write(run, text, tokens, temperature=temperature, top_k=top_k, seed=seed, step=step, ask=ask is not None)
    if as_json:
        print_json(
            {
                "run": run,
                "ask" if ask is not None else "prompt": text,
                "text": "".join(pieces),
                "seed": int(seed),
                "temperature": temperature,
                "top_k": top_k,
            }
        )
        return
    if ask is None:
        click.echo(text, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
