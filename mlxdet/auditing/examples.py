"""For each rule a smallest program that has the leak, and one close to it that has not.

Small shapes, any backend. The tests hold the audit against them; `python -m mlxdet.backends.cuda.check` and
`python -m mlxdet.backends.metal.check` run them on real devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

N = 64  # updates, of which many meet in one of 4 destinations


@dataclass(frozen=True)
class Example:
    """A program `make()` -> (fn, args) and the verdict that the audit must reach with and without real inputs."""

    rule: str  # of the catalogue; for a program without the leak, the rule it is close to
    name: str
    leaks: bool
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    needs: str = "any"  # "gpu": the program calls what only a GPU can run
    inputs: str = "shapes"  # "real": only the values of the indices show that it does not leak


EXAMPLES: list[Example] = []


def _example(rule: str, leaks: bool, **options: str) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        EXAMPLES.append(Example(rule, make.__name__, leaks, make, **options))
        return make

    return add


def _normal(seed: int, *shape: int, dtype: Any = mx.float32) -> Any:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _ids(seed: int = 0, high: int = 4, shape: tuple[int, ...] = (N,)) -> Any:
    return mx.random.randint(0, high, shape, key=mx.random.key(seed))


def _gradient(fn: Callable[..., Any], argument: int = 0) -> Callable[..., Any]:
    """Return the gradient of sum(fn(...) * weights): weights that differ, so that the order of a sum shows."""

    def loss(*args: Any) -> Any:
        y = fn(*args)
        return (y.astype(mx.float32) * mx.random.normal(y.shape, key=mx.random.key(9))).sum()

    return mx.grad(loss, argnums=argument)


@_example("scatter-add", True)
def embedding_gradient() -> Any:
    return _gradient(lambda w, ids: w[ids]), (_normal(1, 8, 16), _ids())


@_example("scatter-add", True)
def embedding_gradient_bfloat16() -> Any:
    return _gradient(lambda w, ids: mx.take(w, ids, axis=0)), (_normal(1, 8, 16, dtype=mx.bfloat16), _ids())


@_example("scatter-add", True)
def add_at() -> Any:
    return lambda x, ids, y: x.at[ids].add(y), (mx.zeros((8, 16)), _ids(), _normal(2, N, 16))


@_example("scatter-add", True)
def multiply_at() -> Any:
    return lambda x, ids, y: x.at[ids].multiply(y), (mx.ones((8, 16)), _ids(), 1 + 0.1 * _normal(2, N, 16))


@_example("scatter-add", True)
def three_updates() -> Any:
    return lambda ids, y: mx.zeros((2, 16)).at[ids].add(y), (mx.array([0, 0, 0]), _normal(2, 3, 16))


@_example("scatter-add", True)
def mixture_gradient_unsorted() -> Any:
    return _gradient(lambda w, x, ids: mx.gather_mm(x, w, rhs_indices=ids)), (
        _normal(1, 4, 8, 8), _normal(2, N, 1, 8), _ids())  # fmt: skip


@_example("scatter-add", True)
def mixture_gradient_sorted_both_sides() -> Any:
    """Sorted, but with indices of both sides: MLX scatters all the same."""
    return _gradient(
        lambda w, x, ids: mx.gather_mm(x, w, mx.arange(N), ids, sorted_indices=True)
    ), (_normal(1, 4, 8, 8), _normal(2, N, 1, 8), mx.sort(_ids()))  # fmt: skip


@_example("scatter-add", True)
def pooling_gradient_overlapping() -> Any:
    return _gradient(lambda x: mx.as_strided(x, (30, 8), (1, 1), 0)), (_normal(1, 37),)


@_example("scatter-add", False)
def add_at_integers() -> Any:
    return lambda x, ids, y: x.at[ids].add(y), (mx.zeros((8, 16), mx.int32), _ids(), mx.ones((N, 16), mx.int32))


@_example("scatter-add", False)
def maximum_at() -> Any:
    return lambda x, ids, y: x.at[ids].maximum(y), (mx.zeros((8, 16)), _ids(), _normal(2, N, 16))


@_example("scatter-add", False)
def two_updates_on_zeros() -> Any:
    return lambda ids, y: mx.zeros((2, 16)).at[ids].add(y), (mx.array([0, 0]), _normal(2, 2, 16))


@_example("scatter-add", False)
def gradient_by_range() -> Any:
    return _gradient(lambda w: w[mx.arange(8)]), (_normal(1, 8, 16),)


@_example("scatter-add", False)
def gradient_by_permutation() -> Any:
    return _gradient(lambda w, order: w[mx.argsort(order)]), (_normal(1, 8, 16), _normal(2, 8))


@_example("scatter-add", True)
def three_of_each_row() -> Any:
    return _gradient(lambda x, order: x[mx.argsort(order) // 3]), (_normal(1, 8, 16), _normal(2, 24))


@_example("scatter-add", False)
def two_of_each_row() -> Any:
    """As the rows of a mixture of experts that takes two experts for each."""
    return _gradient(lambda x, order: x[mx.argsort(order) // 2]), (_normal(1, 8, 16), _normal(2, 16))


@_example("scatter-add", False, inputs="real")
def gradient_by_unique_ids() -> Any:
    return _gradient(lambda w, ids: w[ids]), (_normal(1, 8, 16), mx.array([5, 2, 7, 0]))


@_example("scatter-add", False)
def mixture_gradient_sorted() -> Any:
    return _gradient(lambda w, x, ids: mx.gather_mm(x, w, rhs_indices=ids, sorted_indices=True)), (
        _normal(1, 4, 8, 8), _normal(2, N, 1, 8), mx.sort(_ids()))  # fmt: skip


@_example("scatter-add", False)
def pooling_gradient_apart() -> Any:
    return _gradient(lambda x: mx.as_strided(x, (4, 8), (8, 1), 0)), (_normal(1, 32),)


@_example("scatter-add", False)
def embedding_gradient_one_hot() -> Any:
    from mlxdet.model.embedding import onehot

    return lambda ids, rows: onehot(ids, rows, 8), (_ids(), _normal(1, N, 16))


@_example("scatter-add", False)
def embedding_gradient_fixed_point() -> Any:
    from mlxdet.model.embedding import fixedpoint

    return lambda ids, rows: fixedpoint(ids, rows, 8), (_ids(), _normal(1, N, 16))


@_example("scatter-axis-add", True)
def take_along_axis_gradient() -> Any:
    return _gradient(lambda x, ids: mx.take_along_axis(x, ids, axis=0)), (_normal(1, 8, 16), _ids(shape=(N, 16)))


@_example("scatter-axis-add", True)
def cumulative_maximum_gradient() -> Any:
    return _gradient(lambda x: mx.cummax(x, axis=0)), (-mx.arange(N).reshape(N, 1).astype(mx.float32),)


@_example("scatter-axis-add", False)
def cross_entropy_gradient() -> Any:
    return _gradient(lambda x, t: nn.losses.cross_entropy(x, t)), (_normal(1, N, 8), _ids())


@_example("scatter-axis-add", False)
def take_along_axis_permutation_gradient() -> Any:
    return _gradient(lambda x, y: mx.take_along_axis(x, mx.argsort(y, axis=0), axis=0)), (
        _normal(1, 8, 16), _normal(2, 8, 16))  # fmt: skip


@_example("scatter-assign", True)
def assign_at() -> Any:
    return lambda x, ids, y: _assign(x, ids, y), (mx.zeros((8, 16)), _ids(), _normal(2, N, 16))


@_example("scatter-assign", True)
def put_along_axis() -> Any:
    return lambda x, ids, y: mx.put_along_axis(x, ids, y, axis=0), (
        mx.zeros((8, 16)), _ids(shape=(N, 16)), _normal(2, N, 16))  # fmt: skip


@_example("scatter-assign", False)
def assign_constant() -> Any:
    return lambda x, ids: _assign(x, ids, 1.0), (mx.zeros((8, 16)), _ids())


@_example("scatter-assign", False)
def sort_gradient() -> Any:
    return _gradient(lambda x: mx.sort(x, axis=0)), (_normal(1, N, 16),)


def _assign(x: Any, ids: Any, y: Any) -> Any:
    x = x + 0  # a copy: assignment changes the array itself
    x[ids] = y
    return x


@_example("gated-delta-vjp", True)
def gated_delta_gradient() -> Any:
    return _gradient(lambda q, k, v, g, b: mx.fast.gated_delta_update(q, k, v, g, b)[0]), _gated_delta()


@_example("gated-delta-vjp", False)
def gated_delta_forward() -> Any:
    return lambda q, k, v, g, b: mx.fast.gated_delta_update(q, k, v, g, b)[0], _gated_delta()


def _gated_delta() -> tuple[Any, ...]:
    q, k, v = (_normal(i, 1, 16, 2, 128) * 0.1 for i in range(3))
    return q, k, v, mx.sigmoid(_normal(3, 1, 16, 2)), mx.sigmoid(_normal(4, 1, 16, 2))


def _attention(q: Any, k: Any, v: Any) -> Any:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")


def _qkv(dtype: Any, length: int = 128) -> tuple[Any, ...]:
    return tuple(_normal(i, 2, 4, length, 64, dtype=dtype) for i in range(3))


@_example("cudnn-attention-vjp", True)
def attention_gradient_bfloat16() -> Any:
    return _gradient(_attention), _qkv(mx.bfloat16)


@_example("cudnn-attention-vjp", False)
def attention_gradient_float32() -> Any:
    return _gradient(_attention), _qkv(mx.float32)


@_example("cudnn-attention-vjp", False)
def attention_gradient_odd_length() -> Any:
    return _gradient(_attention), _qkv(mx.bfloat16, 96)


@_example("cudnn-attention-vjp", False)
def attention_forward_bfloat16() -> Any:
    return _attention, _qkv(mx.bfloat16)


@_example("cudnn-attention-vjp", False)
def plain_attention_gradient_bfloat16() -> Any:
    from mlxdet.backends.cuda.attention import attention

    return _gradient(lambda q, k, v: attention(q, k, v, 0.125)), _qkv(mx.bfloat16)


def _layer(x: Any, w: Any, b: Any) -> Any:
    return mx.fast.layer_norm(x, w, b, 1e-5)


@_example("cuda-layer-norm", True)
def layer_norm_wide() -> Any:
    return _layer, (_normal(1, N, 192), _normal(2, 192), _normal(3, 192))


@_example("cuda-layer-norm", False)
def layer_norm_narrow() -> Any:
    return _gradient(_layer), (_normal(1, N, 128), _normal(2, 128), _normal(3, 128))


@_example("cuda-layer-norm", False)
def plain_layer_norm_gradient() -> Any:
    from mlxdet.backends.cuda.norms import layer_norm

    return _gradient(lambda x, w, b: layer_norm(x, w, b, 1e-5)), (_normal(1, N, 192), _normal(2, 192), _normal(3, 192))


@_example("cuda-rms-norm-vjp", True)
def rms_norm_gradient() -> Any:
    return _gradient(lambda w, x: mx.fast.rms_norm(x, w, 1e-5)), (_normal(2, 512), _normal(1, 4 * N, 512))


@_example("cuda-rms-norm-vjp", False)
def rms_norm_forward() -> Any:
    return lambda w, x: mx.fast.rms_norm(x, w, 1e-5), (_normal(2, 512), _normal(1, 4 * N, 512))


@_example("cuda-rms-norm-vjp", False)
def rms_norm_gradient_other_width() -> Any:
    return _gradient(lambda w, x: mx.fast.rms_norm(x, w, 1e-5)), (_normal(2, 384), _normal(1, 4 * N, 384))


@_example("cudnn-convolution", True)
def convolution_gradient() -> Any:
    return _gradient(lambda x, w: mx.conv2d(x, w)), (_normal(1, 2, 8, 8, 4), _normal(2, 4, 3, 3, 4))


@_example("cudnn-convolution", False)
def unfolded_convolution_gradient() -> Any:
    return _gradient(lambda x, w: x.reshape(-1, 36) @ w), (_normal(1, 2, 9, 36), _normal(2, 36, 4))
