"""mlxdet generate."""

import sys

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--prompt", default="The ", show_default=True, metavar="TEXT", help="Text to go on from.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), metavar="N", help="Tokens to write.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0), metavar="X",
              help="0: always the most likely token.")  # fmt: skip
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), metavar="K", help="0: all tokens.")
@click.option("--seed", default="0", show_default=True, metavar="N", help="Seed of the draws, apart from the run's.")
@click.option("--step", type=click.IntRange(1), metavar="N", help="Checkpoint to use. Default: the newest.")
@common
def generate(
    run: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: str, step: int | None, as_json: bool
) -> None:
    """Write text with a trained run. The same seed writes the same text.

    \b
    Example:
      mlxdet generate runs/book --prompt "It was" --temperature 0.7 --seed 3
    """
    from mlxdet.training.write import write

    pieces = write(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, step=step)
    if as_json:
        text = "".join(pieces)
        print_json(
            {"run": run, "prompt": prompt, "text": text, "seed": int(seed), "temperature": temperature, "top_k": top_k}
        )
        return
    click.echo(prompt, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
