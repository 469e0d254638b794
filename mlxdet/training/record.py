"""The fields of a step's log line that say what it read and measured beside loss and gradient norm."""

from typing import Any

import numpy as np

from mlxdet.data.packing import RecordBatch
from mlxdet.training.corpora import AnyBatch


def described(batch: AnyBatch, outcome: Any, measures: tuple[str, ...], tokens: int) -> dict[str, Any]:
    """Return the fields, in their order in the log.

    `measures`: names of the objective's, the loss first. `tokens`: of text, those trained up to this step.
    """
    read = {"batch": batch.digest, "rows": batch.rows.tolist()}
    if not isinstance(batch, RecordBatch):
        return {"tokens": tokens, **read}
    more = dict(zip(measures[1:], outcome.measures.tolist()[1:], strict=True))
    return {"scored": int(np.count_nonzero(batch.scored)), **more, **read}
