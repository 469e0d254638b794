"""From a function to the graph of its primitives, on any machine, evaluating nothing.

`mx.export_function` hands over the whole graph: for each primitive its state, and the shapes and dtypes of what goes in
and out. Where it meets a primitive whose state it cannot give, the names of all primitives are read from the picture
that `mx.export_to_dot` draws of the same graph: complete too, but without shapes.
"""

import inspect
import io
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxdet.auditing.hooks import MAGIC, Call, Piece, Record, hooked
from mlxdet.auditing.state import Reachable, map_arrays, reachable
from mlxdet.errors import UsageError


@dataclass(frozen=True)
class Value:
    """An array of the graph."""

    id: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Node:
    """A primitive of the graph: its export name, its state, its arrays."""

    name: str
    state: list[Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass
class Graph:
    """A traced function. `names` is filled instead of `nodes` where the trace has no shapes; `blind` says why."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # id -> path of the argument or variable
    outputs: list[tuple[str, Value]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    real: dict[str, Any] = field(default_factory=dict)  # id -> the array that was given
    calls: dict[int, Call] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)  # id of a mark's constant, as broadcast -> number of its call
    differentiated: set[int] = field(default_factory=set)  # calls whose backward pass is taken
    names: list[str] = field(default_factory=list)
    blind: str = ""
    failed: str = ""  # the function could not be traced at all: why
    pieces: list[tuple[Piece, "Graph"]] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    held: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.maker: dict[str, Node] = {}
        self.users: dict[str, list[Node]] = defaultdict(list)

    def index(self) -> None:
        """Fill what is derived: who makes and uses an array, the marks, and which calls have a backward pass."""
        for node in self.nodes:
            self.maker.update({v.id: node for v in node.outputs})
            for v in node.inputs:
                self.users[v.id].append(node)
        pending = [
            (i, int(a.item()) - MAGIC)
            for i, a in self.constants.items()
            if a.dtype == mx.uint32 and tuple(a.shape) == (1,)
        ]
        while pending:
            i, number = pending.pop()
            if number not in self.calls:
                continue
            for user in self.users[i]:
                if user.name in ("AsType", "Broadcast", "Reshape", "ExpandDims"):
                    pending.append((user.outputs[0].id, number))
                elif user.name != "Maximum":  # max(y, mark) compares them in its backward pass
                    self.differentiated.add(number)
            self.marks[i] = number


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Trace fn(*args, **kwargs) with all the state it changes. Raises UsageError if the function itself fails."""
    names = _argument_names(fn, len(args))
    call = dict(zip(names, args, strict=True)) | kwargs
    own: list[tuple[str, Any]] = []
    objects: dict[str, Any] = {}

    def note(path: str, leaf: Any) -> Any:
        if isinstance(leaf, mx.array):
            own.append((path, leaf))
        elif not isinstance(leaf, str | int | float | bool | type(None)):
            objects[path] = leaf
        return leaf

    map_arrays(call, note)
    around = reachable({**objects, getattr(fn, "__name__", type(fn).__name__): fn})
    held: dict[int, tuple[str, Any]] = {}
    for slot, array in around.slots:
        held.setdefault(id(array), (slot.path, array))
    given = own + list(held.values())
    random_state: Any = mx.random.state
    random_key = random_state[0].tolist()
    with hooked(around.seen) as record:
        try:
            run = _Run(fn, args, kwargs, own, list(held), around, record)
            graph = _export(run, given)
        finally:
            for restore in around.restore:
                restore()
            mx.random.seed((random_key[0] << 32) | random_key[1])
    graph.questions, graph.held = record.questions, record.held
    graph.pieces = [(p, trace(p.fn, p.args, {})) for p in record.pieces]
    return graph


def _argument_names(fn: Any, count: int) -> list[str]:
    try:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind in positional]
    except (TypeError, ValueError):
        parameters = []
    return [parameters[i].name if i < len(parameters) else f"args[{i}]" for i in range(count)]


@dataclass
class _Run:
    """One call of the function with placeholders for all arrays."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: list[tuple[str, Any]]
    held: list[int]
    around: Reachable
    record: Record
    paths: list[str] = field(default_factory=list)

    def __call__(self, *placeholders: Any) -> list[Any]:
        """Return every array that comes out: returned, evaluated inside, or left in the state."""
        rest = iter(placeholders)
        args, kwargs = map_arrays(
            (list(self.args), self.kwargs), lambda _, x: next(rest) if isinstance(x, mx.array) else x
        )
        by_id = dict(zip(self.held, rest, strict=True))
        for slot, array in self.around.slots:
            slot.set(by_id[id(array)])
        self.record.evaluated.clear()
        returned = self.fn(*args, **kwargs)
        out: list[tuple[str, Any]] = []
        self._collect("returned", returned, out)
        for i, tree in enumerate(self.record.evaluated):
            self._collect(f"evaluated[{i}]", tree, out)
        names = _argument_names(self.fn, len(args))
        self._collect("", dict(zip(names, args, strict=True)) | kwargs, out)
        self._collect("state", self.fn, out)
        first: dict[int, tuple[str, Any]] = {}
        for path, array in out:
            first.setdefault(id(array), (path, array))
        self.paths = [path for path, _ in first.values()]
        return [array for _, array in first.values()]

    def _collect(self, path: str, tree: Any, out: list[tuple[str, Any]]) -> None:
        def take(where: str, leaf: Any) -> Any:
            if isinstance(leaf, mx.array):
                out.append((where, leaf))
            else:
                found = reachable({where: leaf})
                out.extend((s.path, array) for s, array in found.slots)
                out.extend(found.fixed.values())

        map_arrays({path: tree} if path else tree, take)


def _export(run: _Run, given: list[tuple[str, Any]]) -> Graph:
    graph = Graph()
    blanks = [mx.zeros(a.shape, a.dtype) for _, a in given]  # never evaluated: they stand for shapes and dtypes
    head: dict[str, Any] = {}

    def take(part: dict[str, Any]) -> None:
        if part["type"] != "primitive":
            head[part["type"]] = part
            return
        values = [tuple(Value(i, tuple(s), d) for i, s, d in part[k]) for k in ("inputs", "outputs")]
        graph.nodes.append(Node(part["name"], list(part["arguments"]), *values))

    try:
        mx.export_function(take, run, *blanks)
    except ValueError as error:
        hidden = re.search(r"Unable to get state for primitive (\S+)", str(error))
        if hidden is None:
            return _untraceable(run, error)
        graph.nodes, graph.blind = [], hidden[1]
        run.record.calls.clear()
        run.record.pieces.clear()
        for restore in run.around.restore:
            restore()
        graph.names = _names(run(*blanks))
        graph.calls = {c.number: c for c in run.record.calls}
        graph.differentiated = set(graph.calls)  # not seen, so taken to be
        return graph
    except Exception as error:
        return _untraceable(run, error)
    ids = [i for i, _, _ in head["inputs"]["inputs"]]
    graph.inputs = {i: path for i, (path, _) in zip(ids, given, strict=True)}
    graph.real = {i: a for i, (_, a) in zip(ids, given, strict=True)}
    outputs = (Value(i, tuple(s), d) for i, s, d in head["outputs"]["outputs"])
    graph.outputs = list(zip(run.paths, outputs, strict=True))
    graph.constants = dict(head["constants"]["constants"])
    graph.calls = {c.number: c for c in run.record.calls}
    graph.index()
    return graph


def _untraceable(run: _Run, error: Exception) -> Graph:
    """Return the graph of a function that needs a GPU to be traced. Raises UsageError for any other failure."""
    at = error.__traceback__
    line = ""
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if "/mlx/" not in file and "/mlxdet/auditing/" not in file:
            line = f"{file}:{at.tb_lineno}"
        at = at.tb_next
    where = f" at {line}" if line else ""
    text = " ".join(str(error).split())
    if "kernel]" in text or "CustomKernel" in text or "Custom kernels" in text:
        return Graph(failed=f"a kernel written by the user is called{where}, and it can only be traced on its device")
    if "[eval]" in text:
        raise UsageError(
            f"the function reads the value of an array{where}, which a trace does not have: audit the part before it, "
            f"without .item(), float(), or printing"
        ) from error
    raise UsageError(f"the function cannot be traced: {type(error).__name__}{where}: {text}") from error


def _names(outputs: list[Any]) -> list[str]:
    """Return the names of the primitives behind lazy arrays."""
    if not outputs:
        return []
    picture = io.StringIO()
    mx.export_to_dot(picture, *outputs)
    return re.findall(r'\[label ="([^"]+)", shape=rectangle\]', picture.getvalue())
