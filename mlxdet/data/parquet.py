"""Rows of a Parquet file (the usual form of a Hugging Face data set), written out once as JSON lines.

Parquet is compressed in groups of rows, so a single row cannot be reached at a fair price. The columns that the corpus
knows are therefore copied, a batch of rows at a time, into an unnamed temporary file, and everything after that is as
for JSON lines. Rows count from 1. A null is a field that is not there: Parquet has one set of columns for all rows.

Needs pyarrow: `pip install "mlxdet[parquet]"`.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from mlxdet.data.jsonl import JsonLines, short
from mlxdet.data.sources import Source, readable
from mlxdet.errors import UsageError

MAGIC = b"PAR1"
ROWS = 1024  # decoded at a time


def is_parquet(source: Source) -> bool:
    """Return whether the file starts as a Parquet file does."""
    with source.open() as file, readable(source.name):
        return file.read(len(MAGIC)) == MAGIC


class ParquetRows(JsonLines):
    """As JsonLines, over the columns `fields` of a Parquet file. `ignored`: the other columns, once scanned."""

    unit = "row "

    def __init__(self, source: Source, fields: Sequence[str]):
        super().__init__(source)
        self._held = None
        self._fields = fields
        self.ignored: list[str] = []

    def scan(self) -> Iterator[bytes]:
        """As JsonLines.scan. Raises UsageError without pyarrow, too, and on a damaged file or an odd column."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UsageError(
                f'{self.name}: a Parquet file; reading it needs pyarrow: pip install "mlxdet[parquet]"'
            ) from None
        check = hashlib.sha256()
        for chunk in self._source.chunks():
            check.update(chunk)
        with tempfile.TemporaryFile() as copy, self._source.open() as file:
            try:
                table = pyarrow.parquet.ParquetFile(file)
                names = table.schema_arrow.names
                self.ignored = [name for name in names if name not in self._fields]
                known = [name for name in names if name in self._fields]
                if len(set(known)) != len(known):
                    raise UsageError(f"{self.name}: two columns have the same name, among {', '.join(known)}")
                for batch in table.iter_batches(ROWS, columns=known):
                    for row in batch.to_pylist():
                        raw = json.dumps(_present(row), ensure_ascii=False, default=self._odd).encode()
                        self._add(copy.tell(), len(raw), len(self) + 1)
                        copy.write(raw)
                        yield raw
            except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
                message = (str(error).splitlines() or [type(error).__name__])[0]
                raise UsageError(f"{self.name}: cannot be read as Parquet: {short(message)}") from None
            copy.flush()
            self._keep(copy.fileno())
        self.sha256 = check.hexdigest()

    def _odd(self, value: Any) -> None:
        raise UsageError(
            f"{self.name}:{self.unit}{len(self) + 1}: holds a value of type {type(value).__name__}; a field must be a "
            f"string or a list of messages"
        )

    def offset(self, row: int) -> int:
        """Return 0: the bytes of a row have no one place in the file."""
        return 0


def _present(value: Any) -> Any:
    """Return `value` without the fields that are null."""
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_present(inner) for inner in value]
    return value
