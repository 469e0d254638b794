"""The text or rows of a config or run, checked against what the run was trained on, and their batches. No MLX here."""

from pathlib import Path
from typing import Any

from mlxdet.config import TrainConfig
from mlxdet.data.batches import Batch, TextBatches
from mlxdet.data.packing import RecordBatch, RecordBatches
from mlxdet.data.records import KINDS, RecordCorpus
from mlxdet.data.text import Corpus, open_corpus
from mlxdet.errors import UsageError
from mlxdet.training import provenance
from mlxdet.training.run import Run

AnyCorpus = Corpus | RecordCorpus
AnyBatch = Batch | RecordBatch
AnyBatches = TextBatches | RecordBatches


def open_corpus_of(config: TrainConfig) -> AnyCorpus:
    """Return the corpus of a resolved config: text, or rows as its objective reads. Raises UsageError if unreadable."""
    if config.tune.objective != "lm":
        d = config.data
        kind = d.rows if config.tune.objective == "sft" else "preference"
        assert config.model.context
        return KINDS[kind](
            d.data, d.tokenizer, template=d.template, context=config.model.context, truncate=d.truncate,
            unk_limit=d.unk_limit,
        )  # fmt: skip
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


def batches_of(config: TrainConfig, corpus: AnyCorpus) -> AnyBatches:
    """Return the batches of a resolved config over its corpus."""
    if not isinstance(corpus, RecordCorpus):
        return text_batches(config, corpus)
    assert config.seeds.data_seed is not None
    return RecordBatches(
        corpus,
        batch=config.optim.batch,
        accumulation=config.optim.accumulation,
        packing=config.data.packing,
        data_seed=config.seeds.data_seed,
        val_fraction=config.data.val_fraction,
        val_windows=config.loop.val_windows,
    )


def open_data(run: Run) -> tuple[AnyCorpus, AnyBatches]:
    """Return the corpus and batches of a run, the corpus checked against the manifest. Does not import MLX."""
    corpus = open_corpus_of(run.config)
    if corpus.describe()["digest"] != run.manifest["corpus"]["digest"]:
        raise UsageError(
            f"{run.path}: the text is not the one this run was trained on:{corpus_diff(run, corpus.describe())}"
        )
    return corpus, batches_of(run.config, corpus)


def corpus_diff(run: Run, now: dict[str, Any]) -> str:
    a, b = provenance.flat(run.manifest["corpus"]), provenance.flat(now)
    return "".join(f"\n  {k}: the run has {a.get(k)!r}, here it is {b.get(k)!r}" for k in a | b if a.get(k) != b.get(k))
