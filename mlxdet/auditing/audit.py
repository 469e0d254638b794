"""mlxdet.audit: trace a function and hold its operations against the rules of a device."""

import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlxdet.auditing import indices
from mlxdet.auditing.hooks import Call
from mlxdet.auditing.report import Audit, Finding, NotAudited, finding
from mlxdet.auditing.rules import PICTURE_NAMES, READ_FROM, RULES, SAFE, TARGETS, known
from mlxdet.auditing.trace import Graph, Node, trace
from mlxdet.errors import UsageError

_INEXACT = (mx.float16, mx.bfloat16, mx.float32, mx.complex64)
_HALF = (mx.float16, mx.bfloat16)
_SCATTER = ("max", "min", "sum", "prod", "assign")  # state[0] of Scatter
_SCATTER_AXIS = ("sum", "assign")  # state[0] of ScatterAxis


def audit(fn: Callable[..., Any], *args: Any, target: str, inputs: str = "shapes", **kwargs: Any) -> Audit:
    """Return which operations of fn(*args, **kwargs) can give different bits on `target`: metal, cuda or cpu.

    Nothing is evaluated, and no GPU is needed: the function runs once with placeholders. Arguments can be arrays,
    nested dictionaries, lists, tuples, modules and plain values. Arrays that the function reads or changes besides
    (models, optimizers, closures) are traced as well and put back. With inputs="real" the index arrays, and
    nothing else, are computed from the arrays that were given: an index that does not repeat cannot race, for these
    inputs.

    While it runs, hooks are in place and mx.compile compiles nothing in this process: do not train beside it. Raises
    UsageError for a target without rules, and if the function itself fails.
    """
    if inputs not in ("shapes", "real"):
        raise UsageError(f"inputs={inputs!r}: it is 'shapes' or 'real'")
    return audit_targets(fn, args, kwargs, (target,), inputs)[target]


def audit_targets(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[str, ...] = TARGETS,
    inputs: str = "shapes",
) -> dict[str, Audit]:
    """As `audit`, for several targets with one trace."""
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"target {target!r}: it is {', '.join(TARGETS)}")
    graph = trace(fn, args, kwargs)
    return {target: judge(graph, target, inputs == "real") for target in targets}


def judge(graph: Graph, target: str, real: bool = False) -> Audit:
    """Hold a traced function against the rules of `target`."""
    j = _Judge(graph, target, real)
    j.run()
    parts = [(piece, judge(inner, target, False)) for piece, inner in graph.pieces]
    findings, unknown, notes, names = list(j.findings), list(j.unknown), list(j.notes), Counter(j.names)
    for piece, part in parts:
        findings += [replace(f, where=f"{piece.title}: {f.where}", line=f.line or piece.line) for f in part.findings]
        unknown += [replace(n, what=f"{piece.title}: {n.what}", line=n.line or piece.line) for n in part.not_audited]
        notes += [n for n in part.notes if n not in notes]
        names.update(part.operations)
    return Audit(
        target, sum(names.values()), _merged(findings), tuple(dict.fromkeys(unknown)), tuple(notes), dict(names)
    )


def _merged(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(replace(f, count=n) for f, n in Counter(findings).items())


class _Judge:
    def __init__(self, graph: Graph, target: str, real: bool):
        self.graph, self.target, self.real = graph, target, real
        self.findings: list[Finding] = []
        self.unknown: list[NotAudited] = []
        self.notes: list[str] = []
        self.names: list[str] = [n.name for n in graph.nodes]

    def run(self) -> None:
        g = self.graph
        if g.failed:
            self.unknown.append(NotAudited("the whole function", g.failed))
        elif not g.nodes and not g.names:
            self.unknown.append(
                NotAudited("the whole function", "no operation leads to a result that the trace can see")
            )
        self._names_only()
        for node in g.nodes:
            self._node(node)
        for call in g.calls.values():
            self._call(call)
        if self.target != "cpu":
            for what, line in dict.fromkeys(g.questions):
                self.unknown.append(
                    NotAudited(f"{what}()", "the function asks for the device, and only one branch is traced", line)
                )
            for what, holder in dict.fromkeys(g.held):
                self.unknown.append(
                    NotAudited(what, f"{holder} keeps a reference to it, so that its calls are not seen")
                )
        if (here := version("mlx")) not in READ_FROM:
            self._note(f"the rules were read from MLX {', '.join(READ_FROM)}; this is {here}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _names_only(self) -> None:
        """Judge a graph of which only the names are known."""
        if not self.graph.blind:
            return
        self._note(f"the trace has no shapes, as {self.graph.blind} cannot be exported; operations are known by name")
        for picture, count in Counter(self.graph.names).items():
            name = PICTURE_NAMES.get(picture, picture.split(" ")[0])
            if picture.startswith("Compiled"):
                name = "Compiled"
            self.names += [name] * count
            if name == "Scatter-ordered" or (name in ("Scatter", "ScatterAxis") and self.target == "cpu"):
                continue
            if not known(name):
                self._no_rule(name)
            elif name in ("Scatter", "ScatterAxis"):
                why = f"its shapes are not known, as {self.graph.blind} cannot be exported, so it may race"
                self.unknown.append(NotAudited(f"{picture} ({count} times)" if count > 1 else picture, why))
            elif name not in SAFE:
                self._by_rule(name, "", (), (), "")

    def _node(self, node: Node) -> None:
        if node.name in ("Scatter", "ScatterAxis"):
            if self.target != "cpu":
                self._scatter(node)
        elif not known(node.name):
            if not any(n.what == node.name for n in self.unknown):
                self._no_rule(node.name)
        elif node.name not in SAFE:
            shapes = tuple(v.shape for v in node.inputs)
            self._by_rule(node.name, self._feeds(node), shapes, node.outputs[0].shape, str(node.outputs[0].dtype))

    def _no_rule(self, name: str) -> None:
        why = f"no rule for it (the rules were read from MLX {', '.join(READ_FROM)}, this is {version('mlx')})"
        self.unknown.append(NotAudited(name, why))

    def _by_rule(self, name: str, where: str, shapes: Any, output: Any, dtype: str) -> None:
        """Apply the rules of a primitive that have no conditions to check."""
        for rule in RULES.values():
            if name in rule.primitives and self.target in rule.devices:
                if rule.unknown:
                    self.unknown.append(NotAudited(name, f"{rule.mechanism}. {rule.remedy}"))
                else:
                    self.findings.append(
                        finding(rule.id, self.target, rule.condition, primitive=name, where=where, line="",
                                shapes=shapes, output=output, dtype=_dtype(dtype))
                    )  # fmt: skip

    def _scatter(self, node: Node) -> None:
        g, base, updates, out = self.graph, node.inputs[0], node.inputs[-1], node.outputs[0]
        how = (_SCATTER if node.name == "Scatter" else _SCATTER_AXIS)[node.state[0]]
        if how in ("max", "min") or (how in ("sum", "prod") and out.dtype not in _INEXACT):
            return
        if how == "assign" and indices.is_constant(g, updates):
            return  # whoever comes last writes the same
        most, why = indices.most_updates(g, node, self.real)
        neutral = {"sum": 0, "prod": 1}.get(how)
        free = 2 if neutral is not None and indices.is_constant(g, base, neutral) else 1
        if most <= free:
            if "these inputs" in why:
                self._note(f"{node.name} into {list(out.shape)}: at most {most} to a destination, {why}")
            return
        rule = "scatter-assign" if how == "assign" else "scatter-add" if node.name == "Scatter" else "scatter-axis-add"
        number = next((c for i in node.inputs[1:-1] if (c := indices.call_of(g, i)) is not None), None)
        verb = "assigned" if how == "assign" else "multiplied" if how == "prod" else "added"
        detail = f"up to {most} updates {verb} to one destination; {why}"
        self.findings.append(
            finding(rule, self.target, detail, primitive=f"{node.name} {how}", where=self._owner(node),
                    line=g.calls[number].line if number is not None else "", shapes=tuple(v.shape for v in node.inputs),
                    output=out.shape, dtype=_dtype(out.dtype))
        )  # fmt: skip

    def _owner(self, node: Node) -> str:
        """Return whose gradient a scatter is: what was looked up with the same indices; else what it feeds."""
        g = self.graph
        mine = {indices.source(g, v).id for v in node.inputs[1:-1]}
        for other in g.nodes:
            if other.name not in ("Gather", "GatherAxis", "GatherMM", "GatherQMM"):
                continue
            inputs = [indices.source(g, v) for v in other.inputs]
            if mine & {v.id for v in inputs}:
                for table in inputs:  # a product may have looked at it transposed
                    if table.id in g.inputs and sorted(table.shape) == sorted(node.outputs[0].shape):
                        return f"gradient of {g.inputs[table.id]}"
        return self._feeds(node)

    def _feeds(self, node: Node) -> str:
        """Return the results that a node reaches through operations of its own shape: its parameter, moments..."""
        g = self.graph
        shape, ends = node.outputs[0].shape, {v.id: path for path, v in g.outputs}
        seen, pending, found = {node.outputs[0].id}, deque([node.outputs[0].id]), []
        while pending:
            i = pending.popleft()
            if i in ends:
                found.append(ends[i])
            for user in g.users[i]:
                for v in user.outputs:
                    if v.shape == shape and v.id not in seen:
                        seen.add(v.id)
                        pending.append(v.id)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"feeds {', '.join(found[:3])}{more}" if found else ""

    def _call(self, call: Call) -> None:
        """Judge a fused operation by its arguments, as on the CPU it is not in the graph."""
        self._count(call)
        rule_id = {
            "ScaledDotProductAttention": "cudnn-attention-vjp",
            "LayerNorm": "cuda-layer-norm",
            "RMSNorm": "cuda-rms-norm-vjp",
            "GatedDeltaUpdate": "gated-delta-vjp",
            "CustomKernel": "user-kernel",
        }.get(call.name)
        if rule_id is None or self.target not in RULES[rule_id].devices:
            return
        rule, gradient = RULES[rule_id], call.number in self.graph.differentiated
        if rule.unknown:
            what = f"{call.name} {call.options.get('kernel', '')}".strip()
            self.unknown.append(NotAudited(what, f"{rule.mechanism}. {rule.remedy}", call.line))
            return
        detail = {
            "cudnn-attention-vjp": self._attention,
            "cuda-layer-norm": _layer_norm,
            "cuda-rms-norm-vjp": _rms_norm,
            "gated-delta-vjp": lambda c, grad: "its backward pass is taken" if grad else "",
        }[rule_id](call, gradient)
        if detail:
            self.findings.append(
                finding(rule_id, self.target, detail, primitive=call.name + ("VJP" if gradient else ""), where="",
                        line=call.line, shapes=call.shapes, output=call.shapes[0], dtype=_dtype(call.dtypes[0]))
            )  # fmt: skip

    def _count(self, call: Call) -> None:
        if call.name != "index":
            self.names.append(call.name)
            if call.number in self.graph.differentiated and call.name in ("LayerNorm", "RMSNorm"):
                self.names.append(call.name + "VJP")

    def _attention(self, call: Call, gradient: bool) -> str:
        queries, dtype = call.shapes[0], call.dtypes[0]
        length, width = queries[-2:]
        if not gradient or dtype not in _HALF or length % 128 or width % 8 or width > 128:
            return ""
        if os.environ.get("MLX_CUDA_USE_CUDNN_SDPA") == "0":
            self._note("attention is unfused on CUDA because MLX_CUDA_USE_CUDNN_SDPA=0 is set")
            return ""
        return f"backward pass of {_dtype(dtype)} attention with {length} queries and heads of width {width}"


def _layer_norm(call: Call, gradient: bool) -> str:
    width, limit = call.shapes[0][-1], 256 if call.dtypes[0] in _HALF else 128
    return f"rows of {width}, more than {limit}" if width > limit else ""


def _rms_norm(call: Call, gradient: bool) -> str:
    """The fast kernel takes rows of N * 64 * k or N * 128 * k elements, k <= 8, N = 4 (float32) or 8 (half)."""
    width, n = call.shapes[0][-1], 8 if call.dtypes[0] in _HALF else 4
    fast = any(width % (n * unit) == 0 and width // (n * unit) <= 8 for unit in (64, 128))
    if not gradient or not fast or len(call.shapes) < 2:
        return ""
    return f"backward pass over rows of {width}, a length of the fast kernel"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("mlx.core.")
