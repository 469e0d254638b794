"""Fields of a row become turns: strings, message lists, and a prompt with what answers it.

Everything here raises RowError naming the field, the place in it and what is wrong; nothing is converted, so a model
never trains on the spelling of a number or a dictionary.
"""

from collections.abc import Sequence
from typing import Any

from mlxdet.data.jsonl import JSON_KINDS, RowError, short
from mlxdet.data.templates import ROLES, Turn

# Fields of a row or a message that change what it means: tools, and how much (or whether) it is trained on. Null or
# empty ones are as good as absent.
REFUSED = ("tools", "functions", "tool_calls", "function_call", "tool_call_id", "weight")
ABSENT: tuple[Any, ...] = (None, "", [], {})


def refuse(record: dict[str, Any], where: str = "") -> None:
    """Raise RowError if a row or a message holds one of the fields REFUSED."""
    for name in REFUSED:
        if name in record and record[name] not in ABSENT:
            raise RowError(f"{where}field {name!r} would change what the row means, and is not supported; remove it")


def unused(record: dict[str, Any], used: Sequence[str]) -> list[str]:
    """Return the names of fields that are read from nowhere, those of messages as `messages[].name`."""
    names = [name for name in record if name not in used]
    for field in used:
        value = record.get(field)
        found = {name for message in value for name in message} if isinstance(value, list) else set()
        names += [f"{field}[].{name}" for name in sorted(found - {"role", "content"})]
    return names


def text(record: dict[str, Any], name: str, where: str = "") -> str:
    """Return a field that must be a string."""
    if name not in record:
        raise RowError(f"{where}field {name!r} is missing")
    value = record[name]
    if not isinstance(value, str):
        parts = " (content in parts is not supported)" if name == "content" and isinstance(value, list) else ""
        raise RowError(f"{where}field {name!r} must be a string, not {JSON_KINDS[type(value)]}{parts}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{where}field {name!r}: character {error.start + 1} is half of a surrogate pair, which is no text"
            ) from None
    return value


def messages(record: dict[str, Any], name: str, scored: bool) -> list[Turn]:
    """Return a field that must be a list of {role, content}. `scored`: whether its assistant turns are."""
    value = record[name]
    if not isinstance(value, list):
        raise RowError(f"field {name!r} must be a list of messages, not {JSON_KINDS[type(value)]}")
    if not value:
        raise RowError(f"field {name!r} is an empty list; a conversation needs a message")
    turns = []
    for i, message in enumerate(value):
        where = f"{name}[{i}]: "
        if not isinstance(message, dict):
            raise RowError(f"{where}a message must be an object {{role, content}}, not {JSON_KINDS[type(message)]}")
        refuse(message, where)
        role = text(message, "role", where)
        if role not in ROLES:
            raise RowError(f"{where}role {short(role)} is not supported; roles are {', '.join(ROLES)}")
        turns.append(Turn(role, text(message, "content", where), scored and role == "assistant"))
    return turns


def prompt(record: dict[str, Any], name: str) -> list[Turn]:
    """Return a prompt: a string is one user turn, else messages. Nothing in it is scored."""
    if isinstance(record[name], list):
        return messages(record, name, scored=False)
    return [Turn("user", text(record, name))]


def answered(asked: list[Turn], record: dict[str, Any], name: str) -> list[Turn]:
    """Return the prompt `asked` with the answer in field `name`, which is scored.

    The answer is a string, or messages: one assistant turn, alone or after the whole prompt once more.
    """
    if not isinstance(record[name], list):
        return [*asked, Turn("assistant", text(record, name), True)]
    turns = messages(record, name, scored=False)
    if turns[: len(asked)] == asked:
        turns = turns[len(asked) :]
    if [turn.role for turn in turns] != ["assistant"]:
        raise RowError(f"field {name!r} must hold one assistant message, alone or after the prompt")
    return [*asked, turns[0]._replace(scored=True)]
