"""What is put in the place of MLX's functions while a function is traced.

The trace runs on the CPU, on any machine. There fused operations fall apart into plain ones, and their own kernels
would go unseen; a few primitives cannot be exported at all. So for the time of the trace:

  * calls of fused operations leave a mark: max(y, constant), which is not part of the function and is never evaluated.
    The constant tells which call it was, and its gradient, which is a comparison, whether the backward pass is taken.
  * index arrays of lookups get the same mark, so that a scatter can be led back to a line of the user's code.
  * custom functions and user kernels become stand-ins with the same shapes and the same flow of gradients; custom
    functions are traced on their own afterwards, forward and backward.
  * mx.eval takes note of its arguments, checkpoint() recomputes nothing, and compiled functions run uncompiled, as a
    cached graph would hide what is in it.

Hooks see only the thread that traces. References to fused operations that were taken earlier (`from mlx.core.fast
import layer_norm`, a field of an object) are found through the garbage collector and replaced too; those in places that
cannot change (default arguments, tuples) are reported.
"""

import gc
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from mlxdet.auditing.state import map_arrays

MAGIC = 0x6D6C0000  # a mark's constant is MAGIC + its number, uint32, shape (1,)
INTEGERS = (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)
_lock = threading.RLock()
_HERE = tuple(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), f)
    for f in ("hooks.py", "state.py", "trace.py", "audit.py")
)
_MLX = os.path.dirname(os.path.abspath(mx.__file__)) + os.sep  # not mlx_lm, which is a user


@dataclass(frozen=True)
class Call:
    """One call of a hooked function: what, where, and the shapes and dtypes of its array arguments."""

    number: int
    name: str  # of the primitive it becomes on a GPU, or "index" for a lookup
    line: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A function traced on its own: a custom function's forward or backward pass."""

    title: str
    line: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass
class Record:
    """What the hooks saw."""

    calls: list[Call] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    evaluated: list[Any] = field(default_factory=list)  # arguments of mx.eval: results like those returned
    questions: list[tuple[str, str]] = field(default_factory=list)  # (function that tells the device, line)
    held: list[tuple[str, str]] = field(default_factory=list)  # (fused operation, what keeps a reference to it)


def user_line() -> str:
    """Return "file:line" of the innermost frame that is neither MLX's nor the audit's; "" if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_HERE, _MLX, "<frozen")):
            short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Hooks:
    def __init__(self, record: Record):
        self.record, self.owner, self.muted = record, threading.get_ident(), False
        self.seen_pieces: set[Any] = set()

    def active(self) -> bool:
        return threading.get_ident() == self.owner and not self.muted

    def note(self, name: str, arrays: list[Any], **options: Any) -> int:
        number = len(self.record.calls)
        shapes, dtypes = tuple(tuple(a.shape) for a in arrays), tuple(a.dtype for a in arrays)
        self.record.calls.append(Call(number, name, user_line(), shapes, dtypes, options))
        return number

    def mark(self, x: Any, number: int) -> Any:
        return mx.maximum(x, mx.array([MAGIC + number], mx.uint32).astype(x.dtype)) if x.ndim else x

    def fused(self, real: Any, name: str) -> Any:
        """Return `real` with its results marked."""

        def hook(*args: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(*args, **kwargs)
            arrays = [a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)]
            options = {k: v for k, v in kwargs.items() if v is None or isinstance(v, str | int | float | bool)}
            options |= {k: "array" for k, v in kwargs.items() if isinstance(v, mx.array)}
            number = self.note(name, arrays, **options)
            return map_arrays(real(*args, **kwargs), lambda _, y: self.mark(y, number))

        return hook

    def user_kernel(self, real: Any) -> Any:
        """Return a factory of stand-ins for kernels that a user wrote."""

        def make(*args: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(*args, **kwargs)
            title = str(kwargs.get("name", args[0] if args else "?"))

            def kernel(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[Any]:
                arrays = [x for x in inputs if isinstance(x, mx.array)]
                number = self.note("CustomKernel", arrays, kernel=title)
                return [
                    self.mark(stand_in(arrays, s, d), number) for s, d in zip(output_shapes, output_dtypes, strict=True)
                ]

            return kernel

        return make

    def precompiled_kernel(self, real: Any) -> Any:
        def hook(*, name: str, inputs: Any, output_shapes: Any, output_dtypes: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(
                    name=name, inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **kwargs
                )
            kernel = self.user_kernel(real)(name)
            return kernel(inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes)

        return hook

    def custom_call(self, real: Any) -> Any:
        """Return the call of mx.custom_function: a stand-in, with the two passes noted as pieces."""

        def hook(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(function, *args, **kwargs)
            forward, *others = [f for f in gc.get_referents(function) if not isinstance(f, type)]
            backward = next((f for f in others if _takes_three(f)), None)
            arrays = leaves((args, kwargs))
            empty, options = map_arrays(
                (args, kwargs), lambda _, x: mx.zeros(x.shape, x.dtype) if isinstance(x, mx.array) else x
            )
            self.muted = True
            try:
                out = forward(*empty, **options)  # for the shapes of the results
            finally:
                self.muted = False
            key = (id(forward), id(backward), tuple((tuple(a.shape), str(a.dtype)) for a in arrays))
            if key not in self.seen_pieces:
                self.seen_pieces.add(key)
                self._note_passes(forward, backward, empty, options, out)
            return map_arrays(out, lambda _, y: stand_in(arrays, y.shape, y.dtype) if isinstance(y, mx.array) else y)

        return hook

    def _note_passes(self, forward: Any, backward: Any, args: Any, kwargs: dict[str, Any], shape: Any) -> None:
        name, line = getattr(forward, "__name__", "?"), user_line()
        pieces = self.record.pieces
        pieces.append(Piece(f"custom function {name}", line, lambda *a: forward(*a, **kwargs), args))
        if backward is not None:
            primals = args[0] if len(args) == 1 else args
            pieces.append(Piece(f"backward pass of custom function {name}", line, backward, (primals, shape, shape)))
            return

        def gradient(given: Any, cotangents: list[Any]) -> Any:
            def flat(*xs: Any) -> list[Any]:
                rest = iter(xs)
                return leaves(forward(*map_arrays(given, lambda _, x: next(rest) if _has_gradient(x) else x), **kwargs))

            return mx.vjp(flat, [x for x in leaves(given) if _has_gradient(x)], cotangents)[1]

        pieces.append(Piece(f"backward pass of custom function {name}", line, gradient, (args, leaves(shape))))

    def index(self, x: Any) -> Any:
        """Return the index `x` (an array, or a tuple with arrays in it) marked."""
        if isinstance(x, tuple):
            return tuple(self.index(i) for i in x)
        if isinstance(x, mx.array) and x.ndim and x.dtype in INTEGERS:
            return self.mark(x, self.note("index", [x]))
        return x

    def indexing(self, real: Any, position: int) -> Any:
        """Return `real` with its argument number `position` marked as an index."""

        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.active():
                args = tuple(self.index(a) if i == position else a for i, a in enumerate(args))
                kwargs = {k: self.index(v) if k == "indices" else v for k, v in kwargs.items()}
            return real(*args, **kwargs)

        return hook

    def gathered_product(self, real: Any, name: str, position: int) -> Any:
        """Return gather_mm or gather_qmm, whose two index arguments start at `position`.

        With sorted indices of one side the gradient by all but the first factor counts in integers and multiplies
        segments, which cannot be exported, so it is a stand-in. With indices of both sides MLX scatters after all.
        """

        def hook(*args: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(*args, **kwargs)
            kwargs |= dict(zip(("lhs_indices", "rhs_indices"), args[position:], strict=False))
            sides = [k for k in ("lhs_indices", "rhs_indices") if kwargs.get(k) is not None]
            kwargs |= {k: self.index(kwargs[k]) for k in sides}
            first, *rest = args[:position]
            if not kwargs.get("sorted_indices") or len(sides) != 1:
                return real(first, *rest, **kwargs)
            factors = [a for a in (*rest, *kwargs.values()) if _has_gradient(a)]
            rest, kwargs = map_arrays((rest, kwargs), lambda _, a: mx.stop_gradient(a) if _has_gradient(a) else a)
            out = real(first, *rest, **kwargs)
            number = self.note(name, [first, *factors], sorted_indices=True)
            return out + self.mark(stand_in(factors, out.shape, out.dtype), number)

        return hook

    def segmented(self, real: Any) -> Any:
        def hook(a: Any, b: Any, segments: Any, **kwargs: Any) -> Any:
            if not self.active():
                return real(a, b, segments, **kwargs)
            out = real(a, b, segments, **kwargs)
            return self.mark(stand_in([a, b], out.shape, out.dtype), self.note("SegmentedMM", [a, b, segments]))

        return hook

    def question(self, real: Any, name: str) -> Any:
        """Return a function that tells the device, and note who asked: the other branch is not in the trace."""

        def hook(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if self.active() and not caller.startswith((_MLX, *_HERE)):
                self.record.questions.append((name, user_line()))
            return real(*args, **kwargs)

        return hook

    def simple(self, real: Any, ours: Callable[..., Any]) -> Any:
        return lambda *args, **kwargs: (ours if self.active() else real)(*args, **kwargs)


def _takes_three(f: Any) -> bool:
    """Tell a custom function's vjp (primals, cotangents, outputs) from its jvp and vmap, which take two."""
    try:
        inspect.signature(f).bind(None, None, None)
    except TypeError:
        return False
    return True


def _has_gradient(x: Any) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.inexact)


def leaves(tree: Any) -> list[Any]:
    """Return the arrays of a tree, in order."""
    out: list[Any] = []
    map_arrays(tree, lambda _, x: out.append(x) if isinstance(x, mx.array) else None)
    return out


def stand_in(arrays: list[Any], shape: Any, dtype: Any) -> Any:
    """Return an array of this shape and dtype that depends on all `arrays`, made of operations that cannot race."""
    total = mx.zeros((), mx.float32)
    for a in arrays:
        total = total + a.sum().astype(mx.float32)
    return mx.broadcast_to(total.astype(dtype), tuple(shape))


def _invert(x: Any) -> Any:
    """~x by operations that can be exported."""
    if x.dtype == mx.bool_:
        return mx.logical_not(x)
    return mx.bitwise_xor(x, mx.array(-1).astype(x.dtype))


@contextmanager
def hooked(reachable: set[int]) -> Iterator[Record]:
    """Put the hooks in place, yield what they record, and take them away again.

    `reachable`: ids of the objects that the function can reach; a reference that cannot change matters only there.
    """
    with _lock:
        record = Record()
        h = _Hooks(record)
        fast: Any = mx.fast
        fused = {
            "layer_norm": h.fused(fast.layer_norm, "LayerNorm"),
            "rms_norm": h.fused(fast.rms_norm, "RMSNorm"),
            "scaled_dot_product_attention": h.fused(fast.scaled_dot_product_attention, "ScaledDotProductAttention"),
            "metal_kernel": h.user_kernel(fast.metal_kernel),
            "cuda_kernel": h.user_kernel(fast.cuda_kernel),
        }
        if hasattr(fast, "gated_delta_update"):
            fused["gated_delta_update"] = h.fused(fast.gated_delta_update, "GatedDeltaUpdate")
        if hasattr(fast, "precompiled_cuda_kernel"):
            fused["precompiled_cuda_kernel"] = h.precompiled_kernel(fast.precompiled_cuda_kernel)
        note_results = record.evaluated.extend
        replaced: list[tuple[Any, str, Any]] = [
            (mx.custom_function, "__call__", h.custom_call(mx.custom_function.__call__)),
            (mx.array, "__getitem__", h.indexing(mx.array.__getitem__, 1)),
            (mx.array, "__setitem__", h.indexing(mx.array.__setitem__, 1)),
            (mx.array, "__invert__", h.simple(mx.array.__invert__, _invert)),
            (mx.ArrayAt, "__getitem__", h.indexing(mx.ArrayAt.__getitem__, 1)),
            (mx, "take", h.indexing(mx.take, 1)),
            (mx, "take_along_axis", h.indexing(mx.take_along_axis, 1)),
            (mx, "put_along_axis", h.indexing(mx.put_along_axis, 1)),
            (mx, "gather_mm", h.gathered_product(mx.gather_mm, "GatherMM", 2)),
            (mx, "gather_qmm", h.gathered_product(mx.gather_qmm, "GatherQMM", 4)),
            (mx, "segmented_mm", h.segmented(mx.segmented_mm)),
            (mx, "bitwise_invert", h.simple(mx.bitwise_invert, lambda x, **_: _invert(x))),
            (mx, "contiguous", h.simple(mx.contiguous, lambda x, *_, **__: x)),
            (mx, "checkpoint", h.simple(mx.checkpoint, lambda f: f)),
            (mx, "eval", h.simple(mx.eval, lambda *a: note_results(a))),
            (mx, "async_eval", h.simple(mx.async_eval, lambda *a: note_results(a))),
            (mx, "default_device", h.question(mx.default_device, "mx.default_device")),
            (mx.metal, "is_available", h.question(mx.metal.is_available, "mx.metal.is_available")),
            (mx.cuda, "is_available", h.question(mx.cuda.is_available, "mx.cuda.is_available")),
        ]
        undo = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        compiling = _compile_is_on()
        put_back = _replace_references(
            {name: (getattr(fast, name), hook) for name, hook in fused.items()}, record, reachable
        )
        try:
            for owner, name, hook in replaced:
                setattr(owner, name, hook)
            mx.disable_compile()
            with mx.stream(mx.cpu):
                yield record
        finally:
            if compiling:
                mx.enable_compile()
            for owner, name, real in undo:
                setattr(owner, name, real)
            for restore in put_back:
                restore()


def _compile_is_on() -> bool:
    """Tell whether mx.compile compiles. MLX does not say, so count how often it runs a function called twice."""
    runs: list[int] = []

    def count(x: Any) -> Any:
        runs.append(1)
        return x + 1

    compiled, x = mx.compile(count), mx.zeros(1)
    compiled(x), compiled(x)
    return len(runs) == 1


def _replace_references(
    pairs: dict[str, tuple[Any, Any]], record: Record, reachable: set[int]
) -> list[Callable[[], None]]:
    """Replace each real function by its hook wherever Python holds it; return what puts them back."""
    hooks = {id(real): (name, hook) for name, (real, hook) in pairs.items()}
    reals = [real for real, _ in pairs.values()]
    own = {id(pair) for pair in pairs.values()} | {id(reals)}
    own |= {id(cell) for _, hook in pairs.values() for cell in hook.__closure__}
    put_back: list[Callable[[], None]] = []

    def exchange(table: Any, key: Any, real: Any) -> None:
        put_back.append(lambda: table.__setitem__(key, real))
        table[key] = hooks[id(real)][1]

    for holder in gc.get_referrers(*reals):
        if id(holder) in own or isinstance(holder, types.FrameType) or holder is sys._getframe():
            continue
        if isinstance(holder, types.CellType):
            real = holder.cell_contents
            put_back.append(partial(setattr, holder, "cell_contents", real))
            holder.cell_contents = hooks[id(real)][1]
            continue
        table = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", None)
        items = list(table.items()) if isinstance(table, dict) else list(enumerate(table or ()))
        mine = [(key, value) for key, value in items if id(value) in hooks]
        for key, value in mine:
            exchange(table, key, value)
        if not mine and id(holder) in reachable:
            kept = next((hooks[id(v)][0] for v in gc.get_referents(holder) if id(v) in hooks), None)
            if kept is not None:
                what = "a tuple or the defaults of a function" if isinstance(holder, tuple) else repr(type(holder))
                record.held.append((f"mx.fast.{kept}", what))
    return put_back
