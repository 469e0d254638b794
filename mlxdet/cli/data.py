"""mlxdet batches, mlxdet tokenizer train."""

from itertools import pairwise
from typing import Any

import click

from mlxdet.cli.options import common, print_json
from mlxdet.formats.source import escape


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--step", required=True, type=click.IntRange(1), metavar="N", help="The step, from 1.")
@click.option("--row", type=click.IntRange(0), metavar="R", help="Only this row, its whole text.")
@click.option("--detour", type=click.IntRange(0), metavar="D",
              help="As it was after the run's D-th rollback (0: before the first). Default: as it is now.")  # fmt: skip
@common
def batches(run: str, step: int, row: int | None, detour: int | None, as_json: bool) -> None:
    """Show what a step of a run reads: which windows or rows, where they lie, decoded. Trains nothing.

    They follow from (seed, step) and the rollbacks so far, so any step can be asked for, also one the run has not
    reached. Of rows, what is scored is underlined.

    \b
    Example:
      mlxdet batches runs/book --step 4218
    """
    from mlxdet.data.packing import RecordBatch
    from mlxdet.errors import UsageError
    from mlxdet.training.corpora import open_data
    from mlxdet.training.detours import detour_at
    from mlxdet.training.run import Run

    opened = Run(run)
    if step > opened.config.optim.steps:
        raise UsageError(f"--step: {step} is beyond the run's {opened.config.optim.steps} steps")
    corpus, source = open_data(opened)
    detours = opened.past().detours
    if detour is not None and detour > len(detours):
        raise UsageError(f"--detour: {detour} is not one of this run's; it has had {len(detours)} rollbacks")
    batch = source.batch(step, detour_at(detours[:detour], step))
    if isinstance(batch, RecordBatch):
        _rows(run, batch, corpus, row, as_json)
        return
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
        text = escape(r["text"])
        click.echo(f"  {text if row is not None or len(text) <= 100 else text[:97] + '...'}")


def _rows(run: str, batch: Any, corpus: Any, row: int | None, as_json: bool) -> None:
    """Show a batch of rows: each in runs of tokens that are scored or not."""
    from mlxdet.data.packing import pieces
    from mlxdet.errors import UsageError

    tokens = batch.tokens.reshape(-1, batch.tokens.shape[-1])
    scored = batch.scored.reshape(-1, batch.scored.shape[-1])
    found = pieces(batch)
    if row is not None and row >= len(found):
        raise UsageError(f"--row: {row} is not one of the {len(found)} rows, 0 to {len(found) - 1}")
    shown: list[dict[str, Any]] = []
    for i in range(len(found)) if row is None else [row]:
        p, place = found[i], corpus.where(found[i].row)
        mask = [False, *scored[p.line][p.start : p.stop - 1].tolist()]  # a mark belongs to the target
        edges = [k for k in range(1, len(mask)) if mask[k] != mask[k - 1]]
        parts = []
        for first, last in pairwise([0, *edges, len(mask)]):
            ids = tokens[p.line][p.start + first : p.start + last]
            parts.append({"scored": mask[first], "tokens": len(ids), "text": corpus.decode(ids)})
        shown.append(
            {"row": i, "corpus_row": p.row, "window": p.line, "start": p.start, "tokens": p.stop - p.start,
             "file": place.file, "offset": place.offset, "line": place.line, "parts": parts}
            | ({"side": p.side} if p.side else {})
        )  # fmt: skip
    if as_json:
        print_json({"run": run, "step": batch.step, "batch": batch.digest, "rows": shown})
        return
    groups, lines, length = batch.tokens.shape
    click.echo(
        f"step {batch.step}: {len(found)} rows in {groups * lines} windows of {length - 1} tokens, "
        f"{int(scored.sum())} scored, batch digest {batch.digest}"
    )
    for r in shown:
        micro = f" (micro-batch {r['window'] // lines})" if groups > 1 else ""
        side = f", {r['side']}" if "side" in r else ""
        click.echo(f"row {r['row']}{micro}: {r['file']}, line {r['line']}{side}, {r['tokens']} tokens")
        texts = [_short(escape(part["text"]), row is not None) for part in r["parts"]]
        marks = ["^" * len(t) if part["scored"] else " " * len(t) for t, part in zip(texts, r["parts"], strict=True)]
        click.echo("  " + "".join(texts))
        click.echo("  " + "".join(marks).rstrip())


def _short(text: str, whole: bool) -> str:
    return text if whole or len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


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
