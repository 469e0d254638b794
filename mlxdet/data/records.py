"""Corpora of rows: inputs with outputs, conversations, preferences. A row becomes turns, turns become scored tokens.

* `IOSampler`: {input, output}.
* `SFTCorpus`: {messages: [{role, content}, ...]}, {prompt, completion} or {instruction, input?, response}; each row has
  one of these forms. All assistant turns of `messages` are scored; of the others, the completion or response.
* `PreferenceCorpus`: {prompt, chosen, rejected}; two answers to one prompt, only these scored.

A file is checked in full before anything is used: what cannot be understood (a field that is missing or of another
type, an unknown role, tools, content in parts) is an error that names every such line. Rows that are sound but useless
here are dropped, counted by reason, and listed by `dropped`. Fields that are not used are counted in `describe()`, in
how many rows each; those that would change the meaning of a row (`fields.REFUSED`) are refused.

A row holds at most context + 1 tokens: the last one is only ever a target.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mlxdet.data import fields
from mlxdet.data.jsonl import SHOWN, BadRows, JsonLines, RowError, parse, short
from mlxdet.data.parquet import ParquetRows, is_parquet
from mlxdet.data.sources import find_sources
from mlxdet.data.templates import Renderer, Tokens, Turn
from mlxdet.data.text import Location
from mlxdet.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, load_tokenizer
from mlxdet.errors import UsageError

log = logging.getLogger("mlxdet")

NAMES = 100  # ignored fields that are counted by name
REASONS = (
    "empty answer",
    "text spells a marker",
    "prompt too long",  # not one token of an answer fits
    "too long",
    "chosen equals rejected",
    "equal once truncated",
)


class Dropped(NamedTuple):
    """A row that is not used: `place` is `file:line`."""

    place: str
    reason: str
    tokens: int


class RecordCorpus(ABC):
    """What all three have in common. Samples are the rows that are kept, counted from 0; `rows` are all of them.

    A sample is a tuple of token sequences: one, or for preferences two (chosen, rejected).
    """

    kind: ClassVar[str]
    forms: ClassVar[tuple[tuple[str, ...], ...]]  # the fields of each form; the last one holds the answer
    optional: ClassVar[dict[str, tuple[str, ...]]] = {}  # more fields of a form, by its last field
    sides: ClassVar[int] = 1

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: str | None = None,
        *,
        template: str,
        context: int,
        truncate: bool = False,
        unk_limit: float = 0.01,
    ):
        """Read and check all of `paths` (JSONL or Parquet files, directories of them).

        `truncate`: cut rows that are too long instead of dropping them. `unk_limit`: largest accepted share of unknown
        tokens. Raises UsageError for what cannot be read; BadRows naming each row that cannot be understood; UsageError
        if no row is left.
        """
        if not paths:
            raise UsageError("--data: name a file of rows, JSONL or Parquet")
        if context < 1:
            raise UsageError(f"--context: {context} is too small; the least is 1")
        self.tokenizer: ByteTokenizer | SentencePieceTokenizer = load_tokenizer(tokenizer)
        self.renderer = Renderer(template, self.tokenizer)
        self.context, self.truncate = context, truncate
        names = {name for form in (*self.forms, *self.optional.values(), fields.REFUSED) for name in form}
        self._files: list[JsonLines] = [
            ParquetRows(source, sorted(names)) if is_parquet(source) else JsonLines(source)
            for source in find_sources(paths)
        ]
        self._ignored: Counter[str] = Counter()
        self._scan()
        if isinstance(self.tokenizer, SentencePieceTokenizer) and self._unknown > unk_limit * self._seen:
            raise UsageError(
                f"{self._unknown} of {self._seen} tokens ({self._unknown / self._seen:.2%}) are unknown to the "
                f"tokenizer, more than {unk_limit:.2%}; train one with byte fallback (`mlxdet tokenizer train`), or "
                f"raise --unk-limit"
            )
        self._check_any_left()
        if self._truncated or len(self) < self.rows:
            log.warning("%s: %s", self._files[0].name, self.summary())

    # Reading

    def _scan(self) -> None:
        """Index, check and measure every row of every file, once."""
        kept, lengths, scored = array("q"), array("q"), array("q")
        lost, why, sizes = array("q"), array("b"), array("q")
        content = hashlib.blake2b(digest_size=16)
        problems: list[str] = []
        self._bad = self._seen = self._unknown = self._truncated = self._unanswered = self.longest = row = 0
        unknown = self.tokenizer.unknown_id if isinstance(self.tokenizer, SentencePieceTokenizer) else -1
        for file in self._files:
            for n, raw in enumerate(file.scan()):
                try:
                    conversations = self._turns(parse(raw, file.offset(n)), count=True)
                    whole = self._render(conversations)
                except RowError as error:
                    self._bad += 1
                    if len(problems) < SHOWN:
                        problems.append(f"{file.place(n)}: {error}")
                    row += 1
                    continue
                if not problems:
                    size = max(len(part.ids) for part in whole)
                    self.longest = max(self.longest, size)
                    reason, sample = self._fit(conversations, whole)
                    if reason is None:
                        self._truncated += size > self.context + 1
                        self._unanswered += any(not turns[-1].scored for turns in conversations)
                        kept.append(row)
                        lengths.append(max(len(part.ids) for part in sample))
                        scored.append(sum(int(np.count_nonzero(part.scored)) for part in sample))
                        for part in sample:
                            self._seen += len(part.ids)
                            self._unknown += int(np.count_nonzero(part.ids == unknown))
                            content.update(len(part.ids).to_bytes(8, "little"))
                            content.update(part.ids.astype("<i4").tobytes() + part.scored.tobytes())
                    else:
                        lost.append(row)
                        why.append(REASONS.index(reason))
                        sizes.append(size)
                row += 1
            if isinstance(file, ParquetRows):
                self._ignored.update(dict.fromkeys(file.ignored, len(file)))
        if problems:
            raise BadRows(problems, self._bad)
        self.rows = row
        self.kept, self.lengths, self.scored = (np.array(column, np.int64) for column in (kept, lengths, scored))
        self._lost, self._why, self._sizes = (np.array(column, np.int64) for column in (lost, why, sizes))
        self._starts = np.cumsum([0] + [len(file) for file in self._files])
        parts = ["records", self.kind, self.renderer.template.name, self.tokenizer.digest, str(self.vocab_size)]
        parts += [str(self.context), str(self.truncate), content.hexdigest(), *(file.sha256 for file in self._files)]
        self.digest = hashlib.blake2b("".join(part + "\x00" for part in parts).encode(), digest_size=16).hexdigest()

    def _check_any_left(self) -> None:
        name = self._files[0].name
        if not self.rows:
            raise UsageError(f"{name}: there is no row in it, only white space")
        if not len(self):
            counts = ", ".join(f"{n} {reason}" for reason, n in self._reasons().items())
            raise UsageError(
                f"{name}: no row is left of {self.rows}: {counts}. The longest has {self.longest} tokens, a context of "
                f"{self.context} holds {self.context + 1}; raise --context, or give --truncate to cut long rows"
            )

    def _turns(self, record: dict[str, Any], count: bool = False) -> list[list[Turn]]:
        """Return the conversations of a row, one per side. Raises RowError."""
        fields.refuse(record)
        present = [form for form in self.forms if record.get(form[-1]) is not None]
        if len(present) > 1:
            raise RowError(f"fields {', '.join(repr(form[-1]) for form in present)} each hold an answer; keep one")
        form = present[0] if present else max(self.forms, key=lambda form: sum(name in record for name in form))
        missing = [name for name in form if name not in record]
        if missing:
            have = ", ".join(short(name) for name in list(record)[:10]) or "none"
            wanted = " or ".join("{" + ", ".join(form) + "}" for form in self.forms)
            raise RowError(f"field {missing[0]!r} is missing (it has {have}; a row is {wanted})")
        conversations = self.conversations(form, record)
        if count:
            used = (*form, *self.optional.get(form[-1], ()))
            for name in fields.unused(record, used):
                known = name in self._ignored or len(self._ignored) < NAMES
                self._ignored[name if known else "(others)"] += 1
        return conversations

    @abstractmethod
    def conversations(self, form: tuple[str, ...], record: dict[str, Any]) -> list[list[Turn]]:
        """Return the conversations of a record that has all fields of `form`, one per side. Raises RowError."""

    def _render(self, conversations: list[list[Turn]]) -> tuple[Tokens, ...]:
        """Return the tokens of a row, whatever their length. Turns after the last scored one are left out."""
        return tuple(self.renderer.render(turns[: _last_scored(turns) + 1]) for turns in conversations)

    def _fit(self, conversations: list[list[Turn]], whole: tuple[Tokens, ...]) -> tuple[str | None, tuple[Tokens, ...]]:
        """Return (why the row is dropped or None, its tokens as they are used)."""
        limit = self.context + 1
        if any(turn.scored and not turn.text for turns in conversations for turn in turns):
            return "empty answer", whole
        if self.sides > 1 and np.array_equal(whole[0].ids, whole[1].ids):
            return "chosen equals rejected", whole
        if any(self.renderer.spells_marker(turns) for turns in conversations):
            return "text spells a marker", whole
        cut = tuple(Tokens(part.ids[:limit], part.scored[:limit]) for part in whole)
        if not all(part.scored.any() for part in cut):
            return "prompt too long", whole
        if all(len(part.ids) <= limit for part in whole):
            return None, whole
        if not self.truncate:
            return "too long", whole
        if self.sides > 1 and np.array_equal(cut[0].ids, cut[1].ids):
            return "equal once truncated", whole
        return None, cut

    # Using

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.kept)

    def sample(self, i: int) -> tuple[Tokens, ...]:
        """Return the tokens of sample `i`. Thread-safe. Raises UsageError if the file has changed."""
        file, row = self._at(int(self.kept[i]))
        conversations = self._turns(parse(file.raw(row)))
        return self._fit(conversations, self._render(conversations))[1]

    def conversation(self, i: int) -> list[list[Turn]]:
        """Return the turns of sample `i`, one list per side: for an evaluation that asks the model itself."""
        file, row = self._at(int(self.kept[i]))
        return self._turns(parse(file.raw(row)))

    def _at(self, row: int) -> tuple[JsonLines, int]:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not within the {self.rows} of the corpus")
        k = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[k], row - int(self._starts[k])

    def where(self, row: int) -> Location:
        """Return where a row lies: file, byte offset and line (of a Parquet file: 0 and row). Raises IndexError."""
        file, n = self._at(row)
        return Location(file.name, file.offset(n), file.line(n))

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`. Raises ValueError on an id out of range."""
        return self.tokenizer.decode(ids)

    def dropped(self) -> Iterator[Dropped]:
        """Yield the rows that are not used, in order."""
        for row, why, size in zip(self._lost.tolist(), self._why.tolist(), self._sizes.tolist(), strict=True):
            file, n = self._at(row)
            yield Dropped(file.place(n), REASONS[why], size)

    def _reasons(self) -> dict[str, int]:
        counts = np.bincount(self._why, minlength=len(REASONS)).tolist()
        return {reason: n for reason, n in zip(REASONS, counts, strict=True) if n}

    def summary(self) -> str:
        """Return one line: how many rows are kept, dropped and why, cut, and how long the longest is."""
        dropped = [f"{n} dropped ({reason})" for reason, n in self._reasons().items()]
        cut = [f"{self._truncated} truncated"] if self._truncated else []
        counts = ", ".join([f"{len(self)} of {self.rows} rows kept", *dropped, *cut])
        return f"{counts}; the longest has {self.longest} tokens, a context of {self.context} holds {self.context + 1}"

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records; all of it follows from the files, the tokenizer and the settings.

        `truncated`, `unanswered` (rows whose last turns are left out, as no answer follows), `tokens` and `scored` are
        of the rows that are kept; `longest` is of all rows, before any cut.
        """
        model: dict[str, Any] = {"digest": self.tokenizer.digest, "vocab": self.vocab_size}
        if isinstance(self.tokenizer, SentencePieceTokenizer):
            model |= {"sentencepiece": self.tokenizer.version, "unknown": self._unknown}
        return {
            "kind": self.kind,
            "template": self.renderer.template.name,
            "context": self.context,
            "truncate": self.truncate,
            "rows": self.rows,
            "kept": len(self),
            "dropped": self._reasons(),
            "truncated": self._truncated,
            "unanswered": self._unanswered,
            "longest": self.longest,
            "tokens": self._seen,
            "scored": int(self.scored.sum()),
            "ignored_fields": dict(sorted(self._ignored.items())),
            "vocab": self.vocab_size,
            "tokenizer": {"kind": self.tokenizer.kind, **model},
            "digest": self.digest,
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
        }


class IOSampler(RecordCorpus):
    """Rows {input, output}."""

    kind = "io"
    forms = (("input", "output"),)

    def conversations(self, form: tuple[str, ...], record: dict[str, Any]) -> list[list[Turn]]:
        """As of every corpus: the input asks, the output answers."""
        return [[Turn("user", fields.text(record, "input")), Turn("assistant", fields.text(record, "output"), True)]]


class SFTCorpus(RecordCorpus):
    """Conversations {messages}, {prompt, completion} or {instruction, input?, response}."""

    kind = "sft"
    forms = (("messages",), ("prompt", "completion"), ("instruction", "response"))
    optional = {"response": ("input",)}  # noqa: RUF012 - as declared: a class variable

    def conversations(self, form: tuple[str, ...], record: dict[str, Any]) -> list[list[Turn]]:
        """As of every corpus. An input follows the instruction after an empty line."""
        if form[-1] == "messages":
            turns = fields.messages(record, "messages", scored=True)
            if not any(turn.scored for turn in turns):
                raise RowError("field 'messages' has no assistant message, so there is nothing to learn")
            return [turns]
        if form[-1] == "completion":
            return [fields.answered(fields.prompt(record, "prompt"), record, "completion")]
        asked = fields.text(record, "instruction")
        if record.get("input") is not None and fields.text(record, "input"):
            asked += "\n\n" + record["input"]
        return [[Turn("user", asked), Turn("assistant", fields.text(record, "response"), True)]]


class PreferenceCorpus(RecordCorpus):
    """Pairs {prompt, chosen, rejected}: sample(i) is (chosen, rejected)."""

    kind = "preference"
    forms = (("prompt", "chosen", "rejected"),)
    sides = 2

    def conversations(self, form: tuple[str, ...], record: dict[str, Any]) -> list[list[Turn]]:
        """As of every corpus: chosen first."""
        prompt = fields.prompt(record, "prompt")
        return [fields.answered(prompt, record, name) for name in ("chosen", "rejected")]


def _last_scored(turns: Sequence[Turn]) -> int:
    return max(i for i, turn in enumerate(turns) if turn.scored)


KINDS: dict[str, type[RecordCorpus]] = {cls.kind: cls for cls in (IOSampler, SFTCorpus, PreferenceCorpus)}
