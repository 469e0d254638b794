"""Text, tokens, order and batches. Numpy only: nothing here imports MLX, so threads may run all of it."""

from mlxdet.data.batches import Batch, Prefetcher, TextBatches
from mlxdet.data.packing import RecordBatch, RecordBatches
from mlxdet.data.records import IOSampler, PreferenceCorpus, SFTCorpus
from mlxdet.data.text import ByteCorpus, Corpus, Location, TokenizedCorpus, open_corpus
from mlxdet.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Batch",
    "ByteCorpus",
    "Corpus",
    "IOSampler",
    "Location",
    "PreferenceCorpus",
    "Prefetcher",
    "RecordBatch",
    "RecordBatches",
    "SFTCorpus",
    "TextBatches",
    "TokenizedCorpus",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "train_tokenizer",
]
