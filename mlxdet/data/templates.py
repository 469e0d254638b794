"""How a conversation becomes token ids, and which of them are scored.

A template is a table: what is written before a turn, by the role of the turn before it, and what ends an answer. A
pair of roles that the table lacks has no place in the template, and such a row is refused.

* chatml: `<|im_start|>ROLE\\nTEXT<|im_end|>\\n`, as OpenAI published it. User and assistant turns in any order.
* llama: that of Llama 2, which was made for sentencepiece vocabularies: `<s>[INST] <<SYS>>...<</SYS>>... [/INST] TEXT
  </s>`. The space after [/INST] belongs to the prompt, and none comes before </s>: so an answer starts with its own
  first token.
* plain: the prompt, a newline, the answer, `</s>`.

Scored are the tokens of an answer from the first to the end marker, the marker included; never a role, a prompt or
what lies between turns. Every piece is encoded on its own, so no token spans the border of an answer, and a prompt
has the same ids whether or not an answer follows it.

In a byte vocabulary a marker is the bytes of its text. In a sentencepiece vocabulary it is the model's token of that
name where it has one (`</s>` as a rule), else its text is encoded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlxdet.data.jsonl import RowError
from mlxdet.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from mlxdet.errors import UsageError

ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """One message. `scored`: whether it is learned (assistant turns only)."""

    role: str
    text: str
    scored: bool = False


@dataclass(frozen=True)
class Template:
    """`before[previous role, role]`: what comes before a turn's text ("": no turn before); `end`: ends an answer."""

    name: str
    markers: tuple[str, ...]
    before: Mapping[tuple[str, str], str]
    end: str


def _chatml() -> dict[tuple[str, str], str]:
    table = {}
    for before in ("", *ROLES):
        for role in ROLES if not before else ROLES[1:]:  # a system turn comes first or not at all
            close = {"": "", "assistant": "\n"}.get(before, "<|im_end|>\n")
            table[before, role] = f"{close}<|im_start|>{role}\n"
    return table


TEMPLATES = {
    "chatml": Template("chatml", ("<|im_start|>", "<|im_end|>"), _chatml(), "<|im_end|>"),
    "llama": Template(
        "llama",
        ("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        {
            ("", "system"): "<s>[INST] <<SYS>>\n",
            ("", "user"): "<s>[INST] ",
            ("system", "user"): "\n<</SYS>>\n\n",
            ("user", "assistant"): " [/INST] ",
            ("assistant", "user"): "<s>[INST] ",
        },
        "</s>",
    ),
    "plain": Template(
        "plain",
        ("</s>",),
        {
            ("", "system"): "",
            ("", "user"): "",
            ("system", "user"): "\n\n",
            ("user", "assistant"): "\n",
            ("assistant", "user"): "\n",
        },
        "</s>",
    ),
}


class Tokens(NamedTuple):
    """Token ids, int32 (n,), and which of them are scored, bool (n,)."""

    ids: np.ndarray
    scored: np.ndarray


class Renderer:
    """A template over a tokenizer. `end`: the ids of the end marker, after which an answer is complete."""

    def __init__(self, template: str, tokenizer: ByteTokenizer | SentencePieceTokenizer):
        """Raises UsageError on an unknown template, or one whose markers the tokenizer cannot write."""
        if template not in TEMPLATES:
            raise UsageError(f"--template: {template!r} is not a template; choose {', '.join(TEMPLATES)}")
        self.template, self.tokenizer = TEMPLATES[template], tokenizer
        self._special = {m: i for m in self.template.markers if (i := _token(tokenizer, m)) is not None}
        self._fixed = {text: self._encode(text) for text in (*self.template.before.values(), self.template.end)}
        self.end: list[int] = self._fixed[self.template.end].tolist()
        # Text cannot spell a control token, but every other marker.
        self._spelled = [m for m in self.template.markers if not _is_control(tokenizer, m)]

    def _encode(self, text: str) -> np.ndarray:
        """Return the ids of a piece of the template."""
        pattern = "(" + "|".join(map(re.escape, self._special)) + ")" if self._special else "(?!)"
        parts = [
            np.array([self._special[part]], np.int32) if part in self._special else self.tokenizer.encode(part)
            for part in re.split(pattern, text)
            if part
        ]
        ids = np.concatenate([np.zeros(0, np.int32), *parts])
        unknown = self.tokenizer.unknown_id if isinstance(self.tokenizer, SentencePieceTokenizer) else -1
        if (ids == unknown).any() or not all(map(len, parts)):
            raise UsageError(
                f"--template {self.template.name}: the tokenizer has no tokens for {text!r}; choose another template, "
                f"or a tokenizer with byte fallback (`mlxdet tokenizer train`)"
            )
        return ids

    def spells_marker(self, turns: Sequence[Turn]) -> bool:
        """Return whether a text contains a marker, and so would end a turn or start one."""
        return any(marker in turn.text for turn in turns for marker in self._spelled)

    def render(self, turns: Sequence[Turn]) -> Tokens:
        """Return the tokens of a conversation; the first one is never scored, as nothing comes before it.

        Raises RowError if the template has no place for a turn.
        """
        ids: list[np.ndarray] = []
        scored: list[bool] = []
        before = ""
        for i, turn in enumerate(turns):
            ids += [self._before(before, turn.role, i), self.tokenizer.encode(turn.text)]
            scored += [False, turn.scored]
            if turn.role == "assistant":
                ids.append(self._fixed[self.template.end])
                scored.append(turn.scored)
            before = turn.role
        mask = np.repeat(np.array(scored, bool), [len(part) for part in ids])
        mask[:1] = False
        return Tokens(np.concatenate([np.zeros(0, np.int32), *ids]), mask)

    def prompt(self, turns: Sequence[Turn]) -> np.ndarray:
        """Return the ids after which the answer to `turns` starts, int32 (n,): what a model is asked with."""
        last = turns[-1].role if turns else ""
        return np.concatenate([self.render(turns).ids, self._before(last, "assistant", len(turns))])

    def _before(self, previous: str, role: str, i: int) -> np.ndarray:
        text = self.template.before.get((previous, role))
        if text is None:
            where = f"after a turn of role {previous!r}" if previous else "at the start"
            raise RowError(
                f"messages[{i}]: template {self.template.name} has no place for a turn of role {role!r} {where}"
            )
        return self._fixed[text]


def _token(tokenizer: ByteTokenizer | SentencePieceTokenizer, marker: str) -> int | None:
    """Return the token a sentencepiece model keeps for `marker` (a control or user-defined symbol), or None."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    model = tokenizer._model
    token = int(model.piece_to_id(marker))
    return token if model.is_control(token) or _user_defined(model, marker, token) else None


def _user_defined(model: object, marker: str, token: int) -> bool:
    """Whether the model turns the text of the marker into this one token, as it does for user-defined symbols."""
    return model.id_to_piece(token) == marker and token in model.encode(marker)  # type: ignore[attr-defined]


def _is_control(tokenizer: ByteTokenizer | SentencePieceTokenizer, marker: str) -> bool:
    if isinstance(tokenizer, ByteTokenizer):
        return False
    return bool(tokenizer._model.is_control(int(tokenizer._model.piece_to_id(marker))))
