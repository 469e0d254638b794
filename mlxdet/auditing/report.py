"""What an audit says: findings, what it could not judge, and what it assumed."""

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxdet.auditing.rules import RULES


@dataclass(frozen=True)
class Finding:
    """An operation that can give different bits on `target`."""

    rule: str  # id in the catalogue
    target: str
    primitive: str
    where: str  # what it feeds or whose gradient it is, as far as the trace tells
    line: str  # of the user's code; "" where the trace does not tell
    shapes: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    dtype: str
    detail: str
    mechanism: str
    evidence: str
    remedy: str
    count: int = 1  # how often the step has it, in the same place with the same shapes

    def __str__(self) -> str:
        shapes = " ".join(str(list(s)) for s in self.shapes)
        place = " ".join(p for p in (self.where, f"({self.line})" if self.line else "") if p)
        return (
            f"{self.target}: {self.primitive} {shapes} -> {list(self.output)} {self.dtype}: {place or 'place unknown'}"
            f"{f', {self.count} times' if self.count > 1 else ''}\n"
            f"    {self.rule}: {self.detail}\n    {self.mechanism}\n    evidence: {self.evidence}\n"
            f"    way out: {self.remedy}"
        )


@dataclass(frozen=True)
class NotAudited:
    """Something that the audit cannot judge, and why."""

    what: str
    why: str
    line: str = ""

    def __str__(self) -> str:
        return f"not audited: {self.what}{f' ({self.line})' if self.line else ''}: {self.why}"


@dataclass(frozen=True)
class Audit:
    """The result for one target. `ok`: nothing can race, and nothing was left unjudged."""

    target: str
    primitives: int  # in the trace
    findings: tuple[Finding, ...]
    not_audited: tuple[NotAudited, ...]
    notes: tuple[str, ...] = ()  # what an "ok" rests on
    operations: dict[str, int] = field(default_factory=dict)  # primitives by name

    @property
    def ok(self) -> bool:
        return not self.findings and not self.not_audited

    def __str__(self) -> str:
        head = (
            f"{self.target}: {self.primitives} operations, {len(self.findings)} can race, "
            f"{len(self.not_audited)} not audited"
        )
        return "\n".join(
            [head, *map(str, self.findings), *map(str, self.not_audited), *(f"note: {n}" for n in self.notes)]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the audit as JSON-able data."""
        return {
            "target": self.target,
            "ok": self.ok,
            "primitives": self.primitives,
            "findings": [_plain(asdict(f)) for f in self.findings],
            "not_audited": [asdict(n) for n in self.not_audited],
            "notes": list(self.notes),
            "operations": dict(sorted(self.operations.items())),
        }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: [list(s) for s in v] if k == "shapes" else list(v) if k == "output" else v for k, v in values.items()}


def finding(rule_id: str, target: str, detail: str, **values: Any) -> Finding:
    """Return a finding with the texts of its rule."""
    rule = RULES[rule_id]
    return Finding(
        rule_id, target, detail=detail, mechanism=rule.mechanism, evidence=rule.evidence, remedy=rule.remedy, **values
    )
