"""What leaks on which device, and what takes its place: the tables that `make_deterministic` goes through.

The evidence for each is in MLX's sources (0.32): see `docs/op-catalogue.md`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn

from mlxdet.nn import conv, embedding, fast, norms, rebind, switch

GPUS = ("metal", "cuda")
CUDNN = "cuDNN is free to pick a convolution that adds with atomics"
LOOKUP = "the gradient of its lookup is a float scatter, which adds in no fixed order"
FUSED_NORM = "MLX's fused norms use one piece of shared memory twice with one barrier too few"
DELTA = "the gradient of MLX's fused gated_delta_update adds with float atomics"
GATHER = "gradients of gather_mm with unsorted indices, and of the gathers around it, are float scatters"
WITHIN = "look rows up with mlxdet.nn.lookup in its code, or derive it from mlxdet.nn.Embedding"
PLAIN = "derive it from the class of that name in mlxdet.nn"


@dataclass(frozen=True)
class Rule:
    """A module whose `__call__` is that of the class `original` (dotted name) gets `mixin` in front of its class.

    `mixin` is a function of the original; it returns None if the original's code is not the one it was written for.
    """

    original: str
    mixin: Callable[[type], type | None]
    now: str
    targets: tuple[str, ...]
    why: str
    remedy: str = "audit the step to see whether it leaks"  # for a subclass with a __call__ of its own


def _always(mixin: type) -> Callable[[type], type]:
    return lambda original: mixin


def _rows(*tables: str) -> Callable[[type], type]:
    """Return a maker of mixins that run the original's `__call__` with rows of `tables` looked up by `lookup`."""

    def make(original: type) -> type:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original.__call__(switch.with_rows(self, *tables), *args, **kwargs)

        return type(original.__name__, (), {"__call__": __call__})

    return make


def _sorting(original: type) -> type | None:
    """SwitchGLU and SwitchMLP: mlx-lm's own `__call__`, with tokens copied before they are sorted."""
    call = original.__call__
    if not isinstance(call, FunctionType) or "_gather_sort" not in rebind.names(call.__code__):
        return None
    return type(original.__name__, (), {"__call__": rebind.rebind(call, {"_gather_sort": switch.gather_sort})})


_LAYERS, _TUNER = "mlx_lm.models.switch_layers.", "mlx_lm.tuner."
RULES = (
    Rule("mlx.nn.Embedding", _always(embedding.Embedding), "mlxdet.nn.Embedding", GPUS, LOOKUP, WITHIN),
    Rule("mlx.nn.LayerNorm", _always(norms.LayerNorm), "mlxdet.nn.LayerNorm", ("cuda",), FUSED_NORM, PLAIN),
    Rule("mlx.nn.RMSNorm", _always(norms.RMSNorm), "mlxdet.nn.RMSNorm", ("cuda",), FUSED_NORM, PLAIN),
    *(
        Rule(f"mlx.nn.{name}", _always(own), f"mlxdet.nn.{name}", ("cuda",), CUDNN, PLAIN)
        for name, own in (("Conv1d", conv.Conv1d), ("Conv2d", conv.Conv2d), ("Conv3d", conv.Conv3d))
    ),
    Rule(_TUNER + "lora.LoRAEmbedding", _rows("lora_a"), "rows by mlxdet.nn.lookup", GPUS, LOOKUP),
    Rule(_TUNER + "dora.DoRAEmbedding", _rows("lora_a", "m"), "rows by mlxdet.nn.lookup", GPUS, LOOKUP),
    *(
        Rule(name, _always(switch.SwitchLinear), "sorted by expert", GPUS, GATHER)
        for name in (_LAYERS + "SwitchLinear", _LAYERS + "QuantizedSwitchLinear", _TUNER + "lora.LoRASwitchLinear")
    ),
    *(
        Rule(_LAYERS + name, _sorting, "tokens copied, then sorted by expert", GPUS, GATHER)
        for name in ("SwitchGLU", "SwitchMLP")
    ),
)

NORMS = ("mlx.nn.LayerNorm", "mlx.nn.RMSNorm")  # these leak in what they call, not in what they are


def asks_super(kind: type) -> bool:
    """Whether the `__call__` of a class hands over to that of its base."""
    return not isinstance(kind.__call__, FunctionType) or "super" in rebind.names(kind.__call__.__code__)


# Functions of mx.fast that leak, wherever a module's code calls them: target -> name -> (from operations, why).
FAST: dict[str, dict[str, tuple[Callable[..., Any], str]]] = {
    "metal": {"gated_delta_update": (fast.gated_delta_update, DELTA)},
    "cuda": {"rms_norm": (fast.rms_norm, FUSED_NORM), "layer_norm": (fast.layer_norm, FUSED_NORM)},
    "cpu": {},
}


_CONVOLUTIONS = (mlx.nn.ConvTranspose1d, mlx.nn.ConvTranspose2d, mlx.nn.ConvTranspose3d)


def suspects(module: mlx.nn.Module, target: str) -> Iterator[tuple[str, str]]:
    """Yield (why, remedy) for what may leak in the code of `module` itself, of what has no replacement here."""
    if target == "cpu":
        return
    if target == "cuda" and isinstance(module, _CONVOLUTIONS):
        yield CUDNN, "repeat or upsample, then mlxdet.nn.Conv1d, Conv2d or Conv3d"
    stride, window = getattr(module, "_stride", None), getattr(module, "_kernel_size", None)
    if stride and window and any(w > s for w, s in zip(window, stride, strict=True)):
        yield "windows overlap, and the gradient of as_strided is a float scatter", "a stride as large as the window"
    if isinstance(module, mlx.nn.Upsample) and (
        module.mode != "nearest" or any(s != int(s) for s in _tuple(module.scale_factor))
    ):
        yield (
            "neighbours are gathered, and the gradient of a gather is a float scatter",
            'mode="nearest", whole factors',
        )
    if isinstance(module, mlx.nn.QuantizedEmbedding) and {"scales", "biases"} & set(module.trainable_parameters()):
        yield "its scales are trainable, and " + LOOKUP, "freeze it, or use mlx.nn.Embedding"
    yield from _own_code(module)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def find(dotted: str) -> type | None:
    """Return the class of that name if its module is imported, as it is where a model has one."""
    module, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def own_functions(kind: type) -> tuple[dict[str, FunctionType], list[FunctionType]]:
    """Return (the Python functions that an instance of a module class finds, those hidden that super() can reach).

    Those of mlx.nn.Module and `__init__` are left out.
    """
    found: dict[str, FunctionType] = {}
    hidden: list[FunctionType] = []
    for base in kind.__mro__[: kind.__mro__.index(mlx.nn.Module)]:
        for name, function in vars(base).items():
            if not isinstance(function, FunctionType) or name == "__init__":
                continue
            if found.setdefault(name, function) is not function:
                hidden.append(function)
    asks = any("super" in rebind.names(f.__code__) for f in found.values())
    return found, hidden if asks else []


def without_fast(kind: type, target: str) -> tuple[type, list[str]] | None:
    """Return (a subclass of `kind` whose code has operations in place of what leaks in mx.fast, the names of that).

    None if the code reaches nothing of the kind. Raises LookupError, naming it, if it is reached in a way that no copy
    of the code can change.
    """
    leaky = {name: make for name, (make, _) in FAST[target].items() if hasattr(mx.fast, name)}

    def used(function: FunctionType) -> set[str]:
        values = rebind.reached(function)
        return {name for name in leaky if any(v is getattr(mx.fast, name) for v in values)}

    functions, hidden = own_functions(kind)
    if behind := set().union(*map(used, hidden)):
        raise LookupError(", ".join(sorted(behind)))
    found = {name: function for name, function in functions.items() if used(function)}
    if not found:
        return None
    copies = {name: rebind.with_fast(function, leaky) for name, function in found.items()}
    if rest := set().union(*map(used, copies.values())):
        raise LookupError(", ".join(sorted(rest)))
    return type(kind.__name__, (kind,), copies), sorted(set().union(*map(used, found.values())))


_KERNEL_MAKERS = ("metal_kernel", "cuda_kernel", "precompiled_cuda_kernel")


def _own_code(module: mlx.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what the code of a class outside mlx.nn reaches that nobody can vouch for."""
    if type(module).__module__.startswith("mlx.nn"):
        return
    found, hidden = own_functions(type(module))
    known = [f for rule in RULES for f in vars(find(rule.original) or object).values()]
    own = [f for f in (*found.values(), *hidden) if f not in known]
    values = [v for f in own for v in rebind.reached(f)] + list(vars(module).values())
    if any(_is_kernel(v) for v in values):
        yield "a GPU kernel of its own, which nobody can see into", "audit the step: it tells whether it is reached"
    if any(v is f for v in values for f in (mx.gather_mm, mx.gather_qmm)):
        yield GATHER, "sort tokens by expert first and pass sorted_indices=True, as mlxdet.nn.switch does"


def _is_kernel(value: Any) -> bool:
    """Whether it is a kernel made by mx.fast.metal_kernel (a function without a name), or makes such."""
    return isinstance(value, type(mx.add)) and (not value.__module__ or value.__name__ in _KERNEL_MAKERS)
