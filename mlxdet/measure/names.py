"""Which tensor of one checkpoint answers to which of the other, and to which group it belongs."""

import re
from collections.abc import Callable, Sequence

from mlxdet.errors import UsageError
from mlxdet.formats import Checkpoint
from mlxdet.formats.source import quote


class Naming:
    """Maps the names of both sides, and notices mappings that fit nothing and names that collide."""

    def __init__(self, strip: Sequence[str], rename: Sequence[tuple[str, str]]):
        self.strip, self.rename = strip, rename
        self.unused = {("--strip", s) for s in strip} | {("--rename", f"{old}={new}") for old, new in rename}

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return {name to compare under: name in the checkpoint}. Raises UsageError if two names become one."""
        names: dict[str, str] = {}
        for original in checkpoint.tensors:
            name = self._mapped(original)
            if name in names:
                raise UsageError(
                    f"{checkpoint.path}: {quote(names[name])} and {quote(original)} would both be called "
                    f"{quote(name)}; change --strip or --rename"
                )
            names[name] = original
        return names

    def check(self) -> None:
        for option, value in sorted(self.unused):
            raise UsageError(f"{option} {value}: no tensor of either side has such a name")

    def _mapped(self, name: str) -> str:
        for prefix in self.strip:
            if name.startswith(prefix) and name != prefix:
                self.unused.discard(("--strip", prefix))
                name = name[len(prefix) :]
                break
        for old, new in self.rename:
            whole, within = name == old, name.startswith(old if old.endswith(".") else old + ".")
            if whole or within:
                self.unused.discard(("--rename", f"{old}={new}"))
                return new + name[len(old) :]
        return name


def pattern(option: str, text: str) -> re.Pattern[str]:
    """Return a compiled regular expression. Raises UsageError, naming the option."""
    try:
        return re.compile(text)
    except re.error as problem:
        raise UsageError(f"{option} {text!r} is not a regular expression: {problem}") from None


def grouping(expression: str | None) -> Callable[[str], str]:
    """Return what names a tensor's group: the first group, or the whole, of a match; by default its module."""
    if expression is None:
        return module_path
    compiled = pattern("--group", expression)

    def group(name: str) -> str:
        match = compiled.search(name)
        if match is None:
            return "(other)"
        return (match.group(1) if compiled.groups else match.group()) or "(other)"

    return group


def module_path(name: str) -> str:
    """Return the module of a tensor: its name up to the first number, or less its last part if there is none."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name
