"""mlxdet batches, mlxdet tokenizer train."""

from typing import Any

import click

from mlxdet.cli.options import common, print_json


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--step", required=True, type=click.IntRange(1), metavar="N", help="The step, from 1.")
@click.option("--row", type=click.IntRange(0), metavar="R", help="Only this row, its whole text.")
@common
def batches(run: str, step: int, row: int | None, as_json: bool) -> None:
    """Show what a step of a run reads: which windows, where in the text, decoded. Trains nothing.

    The rows follow from (seed, step), so any step can be asked for, also one the run has not reached.

    \b
    Example:
      mlxdet batches runs/book --step 4218
    """
    from mlxdet.errors import UsageError
    from mlxdet.training.corpora import open_data
    from mlxdet.training.run import Run

    opened = Run(run)
    if step > opened.config.optim.steps:
        raise UsageError(f"--step: {step} is beyond the run's {opened.config.optim.steps} steps")
    corpus, source = open_data(opened)
    batch = source.batch(step)
    windows = batch.tokens.reshape(-1, batch.tokens.shape[-1])
    if row is not None and row >= len(windows):
        raise UsageError(f"--row: {row} is not one of the {len(windows)} rows, 0 to {len(windows) - 1}")
    shown: list[dict[str, Any]] = []
    for i in range(len(windows)) if row is None else [row]:
        place = corpus.where(int(batch.rows[i]))
        shown.append(
            {"row": i, "token": int(batch.rows[i]), "file": place.file, "offset": place.offset, "line": place.line,
             "text": corpus.decode(windows[i])}
        )  # fmt: skip
    if as_json:
        print_json({"run": run, "step": step, "batch": batch.digest, "rows": shown})
        return
    _, size, length = batch.tokens.shape
    click.echo(f"step {step}: {len(windows)} rows of {length - 1} tokens, batch digest {batch.digest}")
    for r in shown:
        micro = f" (micro-batch {r['row'] // size})" if len(windows) > size else ""
        click.echo(f"row {r['row']}{micro}: {r['file']}, line {r['line']}, byte {r['offset']}, token {r['token']}")
        text = ascii_safe(r["text"])
        click.echo(f"  {text if row is not None or len(text) <= 100 else text[:97] + '...'}")


def ascii_safe(text: str) -> str:
    """Return `text` on one line: control characters as escapes, so that a poisoned row cannot drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@click.group()
def tokenizer() -> None:
    """Make a sentencepiece tokenizer."""


@tokenizer.command("train")
@click.option(
    "--data", multiple=True, metavar="PATH", help="Text file or directory; repeatable. Default: the embedded text."
)
@click.option("--vocab", required=True, type=click.IntRange(1), metavar="N", help="Number of tokens.")
@click.option("--out", required=True, metavar="FILE", help="Where the model is written.")
@common
def tokenizer_train(data: tuple[str, ...], vocab: int, out: str, as_json: bool) -> None:
    """Train a sentencepiece model on text. The same text gives the same file, byte for byte.

    Every byte has a token of its own (byte fallback) and no character is changed, so any text can be written and read
    back.

    \b
    Example:
      mlxdet tokenizer train --data book.txt --vocab 2000 --out book.model
      mlxdet train --data book.txt --tokenizer book.model
    """
    from mlxdet.data.tokenizer import load_tokenizer, train_tokenizer

    path = train_tokenizer(data, vocab, out)
    model = load_tokenizer(str(path))
    if as_json:
        print_json({"model": str(path), "vocab": model.vocab_size, "sha256": model.digest})
    else:
        click.echo(f"{path}: {model.vocab_size} tokens\n  sha256 {model.digest}")
