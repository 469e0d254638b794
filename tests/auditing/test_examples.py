"""Each rule against a program that has its leak and one that has not; and no primitive of MLX without a rule."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlxdet.auditing import catalogue
from mlxdet.auditing.audit import audit_targets
from mlxdet.auditing.examples import EXAMPLES
from mlxdet.auditing.rules import RULES, SAFE, TARGETS, known


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_the_audit_tells_the_programs_apart(example):
    fn, args = example.make()
    for target, found in audit_targets(fn, args, {}, TARGETS, example.inputs).items():
        leaks = example.leaks and target in RULES[example.rule].devices
        assert {f.rule for f in found.findings} == ({example.rule} if leaks else set()), (target, str(found))
        assert not found.not_audited and found.ok is not leaks


def test_every_rule_that_can_be_judged_has_both_programs():
    for rule in RULES.values():
        if not rule.unknown:
            assert {e.leaks for e in EXAMPLES if e.rule == rule.id} == {True, False}, rule.id


def test_without_its_rule_an_example_passes(monkeypatch):
    """The negative control: the examples fail when a rule is gone."""
    monkeypatch.setitem(
        RULES, "cuda-layer-norm", __import__("dataclasses").replace(RULES["cuda-layer-norm"], devices=())
    )
    example = next(e for e in EXAMPLES if e.name == "layer_norm_wide")
    fn, args = example.make()
    assert audit_targets(fn, args, {}, ("cuda",))["cuda"].ok


def primitives() -> set[str]:
    """The primitive classes in the installed library, from the mangled names of their vtables."""
    library = next(p for p in Path(mx.__file__).parent.glob("lib/libmlx.*") if p.suffix in (".so", ".dylib"))
    data, found = library.read_bytes(), set()
    for match in re.finditer(rb"_ZTVN3mlx4core((?:\d+[A-Za-z]\w*?)+?)E\x00", data):
        rest, parts = match[1].decode(), []
        while (size := re.match(r"\d+", rest)) is not None:
            rest = rest[size.end() :]
            parts.append(rest[: int(size[0])])
            rest = rest[int(size[0]) :]
        if parts[0] in ("fast", "distributed"):
            parts = parts[1:]
        if len(parts) == 1:
            found.add(parts[0])
    # Abstract bases, and what is no primitive.
    return found - {"Primitive", "UnaryPrimitive", "Custom", "DistPrimitive", "Synchronizer"}


def test_every_primitive_of_the_installed_mlx_has_a_rule():
    """A new MLX with a new primitive fails here: read its kernels, then add it to rules.py."""
    found = primitives()
    assert len(found) > 120 and {"Add", "Scatter", "GatedDeltaUpdateVJP", "AllReduce", "CustomKernel"} <= found
    assert {name for name in found if not known(name)} == set()


def test_no_entry_is_both_safe_and_ruled_or_unknown_to_mlx():
    ruled = {p for r in RULES.values() for p in r.primitives}
    assert not ruled & SAFE.keys()
    assert (ruled | SAFE.keys()) - primitives() == set()


def test_a_primitive_without_a_rule_is_not_passed(monkeypatch):
    monkeypatch.delitem(SAFE, "Exp")
    for found in audit_targets(mx.exp, (mx.zeros(3),), {}).values():
        assert not found.ok and found.not_audited[0].what == "Exp" and "no rule" in found.not_audited[0].why


def test_the_catalogue_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "op-catalogue.md"
    assert page.read_text() == catalogue.page(), "run: python -m mlxdet.auditing.catalogue > docs/op-catalogue.md"
