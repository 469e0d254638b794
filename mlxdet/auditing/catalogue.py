"""docs/op-catalogue.md, made from the rules: `python -m mlxdet.auditing.catalogue > docs/op-catalogue.md`."""

from collections import defaultdict

from mlxdet.auditing.rules import CPU_SAFE, READ_FROM, RULES, SAFE


def page() -> str:
    """Return the page."""
    lines = [
        "# Which operations can race",
        "",
        "Made from `mlxdet/auditing/rules.py` by `python -m mlxdet.auditing.catalogue`; a test holds the two together.",
        "`mlxdet audit` judges by these rules.",
        "",
        f"Read from MLX {', '.join(READ_FROM)}: its sources (commit 846d17622) and the binaries of its wheels.",
        "*Inferred*: the mechanism is in the binary; that it changes bits is a conclusion nobody has measured.",
        "",
        "## With conditions",
    ]
    for rule in RULES.values():
        lines += [
            "",
            f"### {rule.id}",
            "",
            f"{rule.operation[0].upper()}{rule.operation[1:]}.",
            "",
            "| | |",
            "|---|---|",
            f"| primitives | {', '.join(f'`{p}`' for p in rule.primitives)} |",
            f"| devices | {', '.join(rule.devices)} |",
            f"| dtypes | {rule.dtypes} |",
            f"| {'not audited' if rule.unknown else 'can race'} | {rule.condition} |",
            f"| mechanism | {rule.mechanism} |",
            f"| evidence | {rule.evidence}{' (inferred)' if rule.proven == 'inferred' else ''} |",
            f"| way out | {rule.remedy} |",
        ]
    lines += [
        "",
        f"On the CPU none of these but `collective` applies: {CPU_SAFE}.",
        "",
        "## Without conditions",
        "",
        "These cannot race on any device.",
        "",
        "| primitives | why |",
        "|---|---|",
    ]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in SAFE.items():
        by_reason[reason].append(name)
    lines += [f"| {', '.join(f'`{n}`' for n in sorted(names))} | {reason} |" for reason, names in by_reason.items()]
    lines += ["", "A primitive that is in neither part has no rule: the audit does not pass a function that has it."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
