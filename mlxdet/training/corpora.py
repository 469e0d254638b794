"""The text of a config or run, checked against what the run was trained on, and its batches. Does not import MLX."""

from pathlib import Path
from typing import Any

from mlxdet.config import TrainConfig
from mlxdet.data.batches import TextBatches
from mlxdet.data.text import Corpus, open_corpus
from mlxdet.errors import UsageError
from mlxdet.training import provenance
from mlxdet.training.run import Run


def open_corpus_of(config: TrainConfig) -> Corpus:
    """Return the corpus of a resolved config. Raises UsageError if it cannot be read."""
    cache = Path(config.data.cache_dir) if config.data.cache_dir else None
    return open_corpus(config.data.data, config.data.tokenizer, cache, config.data.unk_limit)


def text_batches(config: TrainConfig, corpus: Corpus) -> TextBatches:
    """Return the batches of a resolved config over its corpus."""
    assert config.model.context and config.seeds.data_seed is not None
    return TextBatches(
        corpus,
        context=config.model.context,
        batch=config.optim.batch,
        accumulation=config.optim.accumulation,
        order=config.data.order,
        data_seed=config.seeds.data_seed,
        val_fraction=config.data.val_fraction,
        val_windows=config.loop.val_windows,
    )


def open_data(run: Run) -> tuple[Corpus, TextBatches]:
    """Return the corpus and batches of a run, the corpus checked against the manifest. Does not import MLX."""
    corpus = open_corpus_of(run.config)
    if corpus.describe()["digest"] != run.manifest["corpus"]["digest"]:
        raise UsageError(
            f"{run.path}: the text is not the one this run was trained on:{corpus_diff(run, corpus.describe())}"
        )
    return corpus, text_batches(run.config, corpus)


def corpus_diff(run: Run, now: dict[str, Any]) -> str:
    a, b = provenance.flat(run.manifest["corpus"]), provenance.flat(now)
    return "".join(f"\n  {k}: the run has {a.get(k)!r}, here it is {b.get(k)!r}" for k in a | b if a.get(k) != b.get(k))
