"""Which scatters cannot race: how many updates a destination can get, proved from the graph or counted on real inputs.

A destination that gets one update has no order. On a base of zeros two have none either, as 0 + a + b = 0 + b + a.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdet.auditing.hooks import INTEGERS
from mlxdet.auditing.trace import Graph, Node, Value

_SAME_ELEMENTS = ("Reshape", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "Transpose", "Copy", "StopGradient")
_MOST = 1 << 24  # elements of an index array that is worth counting
_FEW = 1 << 16  # ... that depends on no input


def unmarked(graph: Graph, value: Value) -> Value:
    """Return the array behind marks and copies that change no element."""
    while (node := graph.maker.get(value.id)) is not None:
        if node.name == "Maximum" and (node.inputs[1].id in graph.marks or node.inputs[0].id in graph.marks):
            value = node.inputs[node.inputs[0].id in graph.marks]
        elif node.name in ("StopGradient", "Copy"):
            value = node.inputs[0]
        else:
            break
    return value


def call_of(graph: Graph, value: Value) -> int | None:
    """Return the number of the call whose mark `value` carries, looking through changes of shape and type."""
    while (node := graph.maker.get(value.id)) is not None:
        for v in node.inputs:
            if node.name == "Maximum" and v.id in graph.marks:
                return graph.marks[v.id]
        if node.name not in (*_SAME_ELEMENTS, "AsType", "Broadcast"):
            return None
        value = node.inputs[0]
    return None


def source(graph: Graph, value: Value) -> Value:
    """Return the array that `value` was made of by changes of shape and type alone."""
    while (node := graph.maker.get(value.id)) is not None:
        inner = unmarked(graph, value)
        if inner.id != value.id:
            value = inner
        elif node.name in (*_SAME_ELEMENTS, "AsType", "Broadcast"):
            value = node.inputs[0]
        else:
            break
    return value


def repeats(graph: Graph, value: Value, axis: int | None) -> int | None:
    """Return a proven bound on how often an element of `value` occurs, in all of it or (axis given) along that axis.

    A range and a permutation have every element once; divided by m, rounding down, m times. None: nothing is known.
    """
    bound = 1
    while True:
        value = unmarked(graph, value)
        node = graph.maker.get(value.id)
        if node is None:
            return None
        if node.name == "Arange":
            start, stop, step = node.state
            fits = value.dtype in INTEGERS and start >= 0 and step > 0 and stop <= 1 << (8 * value.dtype.size - 1)
            return bound if fits else None
        if node.name in ("ArgSort", "ArgPartition"):
            own = node.state[-1] % max(len(value.shape), 1)
            return bound if (own == axis if axis is not None else len(value.shape) == 1) else None
        if node.name == "FloorDivide" and value.dtype in INTEGERS:
            divisor = compute(graph, node.inputs[1], False)
            if divisor is None or divisor.size == 0 or divisor.min() != divisor.max() or divisor.min() < 1:
                return None
            bound *= int(divisor.max())
        else:
            inner = node.inputs[0].dtype
            whole = value.dtype in INTEGERS and inner in INTEGERS and value.dtype.size >= inner.size
            wider = node.name == "AsType" and whole
            if not (wider or node.name == "Slice" or (axis is None and node.name in _SAME_ELEMENTS)):
                return None
        value = node.inputs[0]


def is_constant(graph: Graph, value: Value, number: float | None = None) -> bool:
    """Tell whether all elements of `value` are one constant (equal to `number`, if given)."""
    while (node := graph.maker.get(value.id)) is not None:
        if node.name not in ("Broadcast", "Full", "AsType", *_SAME_ELEMENTS):
            return False
        value = node.inputs[0]
    array = graph.constants.get(value.id)
    if array is None or array.size != 1:
        return False
    return number is None or array.item() == number


def most_updates(graph: Graph, node: Node, real: bool) -> tuple[int, str]:
    """Return a bound on how many updates of a scatter reach one destination, and how it is known.

    With `real` the indices are computed from the arrays that were given, and counted.
    """
    base, updates = node.inputs[0], node.inputs[-1]
    if node.name == "ScatterAxis":
        axis, index = node.state[1], node.inputs[1]
        count = index.shape[axis]
        if count <= 1:
            return count, "one index along the axis"
        if (bound := repeats(graph, index, axis)) is not None:
            return min(bound, count), "the indices come from a range or a permutation"
        values = compute(graph, index, real)
        if values is None:
            return count, "the indices can repeat"
        ordered = np.sort(values % base.shape[axis], axis=axis)
        return _longest_run(np.moveaxis(ordered, axis, -1).reshape(-1, count)), _counted(graph, index)
    indices, axes = node.inputs[1:-1], node.state[1]
    count = math.prod(indices[0].shape) if indices else 1
    window = updates.shape[len(indices[0].shape) :] if indices else updates.shape
    if count <= 1:
        return count, "one index"
    if any(window[a] != 1 for a in axes):
        return count, "the updates are windows that can overlap"
    if bounds := [b for i in indices if (b := repeats(graph, i, None)) is not None]:
        return min([*bounds, count]), "the indices come from a range or a permutation"
    found = [compute(graph, i, real) for i in indices]
    if any(v is None for v in found):
        return count, "the indices can repeat"
    flat = np.zeros(count, np.int64)
    for values, axis in zip(found, axes, strict=True):
        assert values is not None
        flat = flat * base.shape[axis] + values.reshape(-1).astype(np.int64) % base.shape[axis]
    return _longest_run(np.sort(flat)[None]), _counted(graph, *indices)


def _counted(graph: Graph, *indices: Value) -> str:
    fixed = all(compute(graph, i, False) is not None for i in indices)
    return "counted, as the indices depend on no input" if fixed else "counted, for these inputs"


def _longest_run(rows: np.ndarray) -> int:
    """Return how often the most frequent element of any sorted row occurs in it."""
    starts = np.ones(rows.shape, bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1]
    at = np.append(np.flatnonzero(starts), rows.size)
    return int(np.diff(at).max())


def compute(graph: Graph, value: Value, real: bool) -> np.ndarray | None:
    """Return an index array as numpy computes it, or None where it depends on more than simple integer operations.

    Without `real` only ranges and single numbers are used. Nothing else of the function is evaluated.
    """
    if math.prod(value.shape) > (_MOST if real else _FEW):
        return None
    value = unmarked(graph, value)
    node = graph.maker.get(value.id)
    if node is None:
        array = graph.constants.get(value.id)
        if array is None or array.size > 1:  # a constant with several elements may be data, which another call changes
            array = (graph.real.get(value.id) if array is None else array) if real else None
        if array is None or array.dtype not in (*INTEGERS, mx.bool_):
            return None
        return np.array(array)
    rule = _COMPUTE.get(node.name)
    if rule is None or value.dtype not in (*INTEGERS, mx.bool_):
        return None
    inputs = [compute(graph, v, real) for v in node.inputs]
    if any(x is None for x in inputs):
        return None
    out = np.asarray(rule(node, *inputs)).astype(_numpy(value.dtype))
    return out if out.shape == value.shape else None


def _numpy(dtype: Any) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("mlx.core.").removesuffix("_"))


def _strided(node: Node, x: np.ndarray) -> np.ndarray:
    shape, strides, offset = node.state
    at = np.full(shape, offset, np.int64)
    for axis, (n, s) in enumerate(zip(shape, strides, strict=True)):
        at += (np.arange(n) * s).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return x.reshape(-1)[at]


def _to_shape(node: Node, x: np.ndarray) -> np.ndarray:
    return x.reshape(node.outputs[0].shape)


def _slice(node: Node, x: np.ndarray) -> np.ndarray:
    return x[tuple(slice(a, b, c) for a, b, c in zip(*node.state[:3], strict=True))]


_COMPUTE: dict[str, Any] = {
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze", "Flatten", "Unflatten"), _to_shape),
    **dict.fromkeys(("Full", "AsType", "Copy", "StopGradient"), lambda n, x: np.broadcast_to(x, n.outputs[0].shape)),
    "Arange": lambda n: np.arange(*n.state),
    "Broadcast": lambda n, x: np.broadcast_to(x, n.outputs[0].shape),
    "Transpose": lambda n, x: np.transpose(x, n.state[0]),
    "Slice": _slice,
    "AsStrided": _strided,
    "Concatenate": lambda n, *xs: np.concatenate(xs, axis=n.state[0]),
    "Add": lambda n, a, b: a + b,
    "Subtract": lambda n, a, b: a - b,
    "Multiply": lambda n, a, b: a * b,
    "Maximum": lambda n, a, b: np.maximum(a, b),
    "Minimum": lambda n, a, b: np.minimum(a, b),
    "Less": lambda n, a, b: a < b,
    "Greater": lambda n, a, b: a > b,
    "LessEqual": lambda n, a, b: a <= b,
    "GreaterEqual": lambda n, a, b: a >= b,
    "Equal": lambda n, a, b: a == b,
    "NotEqual": lambda n, a, b: a != b,
    "Select": lambda n, c, a, b: np.where(c, a, b),
    "Sort": lambda n, x: np.sort(x, axis=n.state[0]),
    "ArgSort": lambda n, x: np.argsort(x, axis=n.state[0], kind="stable"),
}
