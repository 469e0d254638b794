"""What people's programs do: models that keep their state, compiled, custom and checkpointed functions, user kernels."""

import gc
import threading
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

import mlxdet
from mlxdet.auditing import hooks
from mlxdet.auditing.audit import audit_targets
from mlxdet.errors import UsageError

IDS = mx.zeros((4, 8), mx.int32)


class Model(nn.Module):
    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, width), nn.LayerNorm(width), nn.Linear(width, 50)
        self.drop = nn.Dropout(dropout)

    def __call__(self, ids):
        return self.head(self.drop(nn.gelu(self.norm(self.embedding(ids)))))


def loss_of(model, ids, targets):
    return nn.losses.cross_entropy(model(ids), targets, reduction="mean")


def make_step(model, optimizer, compiled=False, returns=True):
    """The usual MLX step: it returns the loss and leaves the new weights in the model."""
    value_and_grad = nn.value_and_grad(model, loss_of)

    def step(ids, targets):
        loss, grads = value_and_grad(model, ids, targets)
        optimizer.update(model, grads)
        return loss if returns else None

    state = [model.state, optimizer.state, mx.random.state]
    return mx.compile(step, inputs=state, outputs=state) if compiled else step


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("returns", [True, False])
def test_a_step_that_changes_its_model_is_audited_to_the_end_and_put_back(compiled, returns):
    model, optimizer = Model(), optim.AdamW(1e-3)
    mx.eval(model.parameters())
    optimizer.init(model.trainable_parameters())
    before = dict(tree_flatten(model.parameters())) | {f"o.{k}": v for k, v in tree_flatten(optimizer.state)}
    mx.random.seed(3)
    key = mx.random.state[0].tolist()
    step = make_step(model, optimizer, compiled, returns)
    found = mlxdet.audit(step, IDS, IDS, target="metal")
    (finding,) = found.findings
    assert finding.rule == "scatter-add" and "embedding.weight" in finding.where and finding.dtype == "float32"
    assert finding.shapes[0] == (50, 16) and not found.ok
    after = dict(tree_flatten(model.parameters())) | {f"o.{k}": v for k, v in tree_flatten(optimizer.state)}
    assert all(after[k] is before[k] for k in before) and after.keys() == before.keys()
    assert mx.random.state[0].tolist() == key
    step(IDS, IDS)  # and it still trains
    mx.eval(model.parameters(), optimizer.state)


def test_an_optimizer_without_state_yet_is_left_without(tmp_path):
    model, optimizer = Model(), optim.Adam(1e-3)
    assert mlxdet.audit(make_step(model, optimizer), IDS, IDS, target="cpu").ok
    assert not {"embedding", "norm"} & optimizer.state.keys()


def test_eval_inside_the_function_is_a_result():
    model, optimizer = Model(), optim.SGD(1e-3)
    value_and_grad = nn.value_and_grad(model, loss_of)

    def step(ids, targets):
        mx.eval(value_and_grad(model, ids, targets)[1])

    assert [f.rule for f in mlxdet.audit(step, IDS, IDS, target="metal").findings] == ["scatter-add"]
    del optimizer


def test_nothing_is_evaluated_or_allocated():
    huge = {"w": mx.zeros((1 << 20, 1 << 12))}  # 16 GB, were it made
    gradient = mx.grad(lambda p, ids: p["w"][ids].sum())
    mx.reset_peak_memory()
    assert not mlxdet.audit(gradient, huge, IDS, target="metal").ok
    assert mx.get_peak_memory() < 1 << 20


def test_a_value_read_inside_is_one_clear_error():
    with pytest.raises(UsageError, match=r"reads the value of an array at .*test_audit.py:\d+.*without .item"):
        mlxdet.audit(lambda x: x * x.sum().item(), mx.zeros(3), target="cpu")


def test_a_function_that_fails_is_one_clear_error_and_leaves_nothing_behind():
    fast, call = mx.fast.layer_norm, mx.custom_function.__call__
    with pytest.raises(UsageError, match="cannot be traced: KeyError"):
        mlxdet.audit(lambda x: {}["missing"], mx.zeros(3), target="cpu")
    assert mx.fast.layer_norm is fast and mx.custom_function.__call__ is call and hooks._compile_is_on()


@pytest.mark.parametrize("wrong", [{"target": "tpu"}, {"target": "cpu", "inputs": "some"}])
def test_wrong_options(wrong):
    with pytest.raises(UsageError, match=r"tpu|some"):
        mlxdet.audit(mx.exp, mx.zeros(3), **wrong)


def test_real_inputs_show_that_indices_do_not_repeat():
    gradient = mx.grad(lambda w, ids: mx.square(w[ids]).sum())
    w, unique = mx.zeros((50, 4)), mx.arange(32).reshape(4, 8)
    assert not mlxdet.audit(gradient, w, mx.array(unique), target="metal").ok
    found = mlxdet.audit(gradient, w, mx.array(unique), target="metal", inputs="real")
    assert found.ok and "these inputs" in found.notes[0]
    repeated = mx.where(unique < 3, 0, unique)
    found = mlxdet.audit(gradient, w, repeated, target="metal", inputs="real")
    assert "up to 3 updates" in found.findings[0].detail
    assert "gradient of w" in found.findings[0].where and "test_audit.py" in found.findings[0].line
    assert mlxdet.audit(gradient, w, mx.where(unique < 2, 0, unique), target="metal", inputs="real").ok  # two on zeros


def test_negative_indices_are_the_same_places():
    ids = mx.array([49, -1, 49])
    gradient = mx.grad(lambda w, ids: mx.square(w[ids]).sum())
    assert "up to 3" in mlxdet.audit(gradient, mx.zeros((50, 4)), ids, target="metal", inputs="real").findings[0].detail


# Custom functions, checkpoints, compiled functions


@mx.custom_function
def doubled(x):
    return x * 2


@doubled.vjp
def doubled_vjp(x, cotangent, y):
    return cotangent * 2


@mx.custom_function
def looked_up(w, ids):
    return w[ids]


@looked_up.vjp
def looked_up_vjp(primals, cotangent, y):
    w, ids = primals
    return mx.zeros_like(w).at[ids].add(cotangent), mx.zeros_like(ids)


@mx.custom_function
def without_vjp(w, ids):
    return w[ids]


def test_custom_functions_are_followed_into_both_passes():
    assert all(a.ok for a in audit_targets(mx.grad(lambda x: doubled(x).sum()), (mx.zeros(3),), {}).values())
    for f in (looked_up, without_vjp):
        found = mlxdet.audit(mx.grad(lambda w, f=f: f(w, IDS).sum()), mx.zeros((50, 4)), target="metal")
        assert [x.rule for x in found.findings] == ["scatter-add"]
        assert found.findings[0].where.startswith("backward pass of custom function ")
    assert mlxdet.audit(mx.grad(lambda w: looked_up(w, IDS).sum()), mx.zeros((50, 4)), target="cpu").ok


def test_checkpoints_are_seen_through():
    def gradient(w):
        return mx.grad(lambda w: mx.checkpoint(lambda w: mx.exp(w[IDS]))(w).sum())(w)

    assert [f.rule for f in mlxdet.audit(gradient, mx.zeros((50, 4)), target="cuda").findings] == ["scatter-add"]


def test_a_checkpoint_made_before_is_known_by_its_names_and_never_passed_in_silence():
    early = mx.checkpoint(lambda w: mx.exp(w[IDS]))
    found = mlxdet.audit(mx.grad(lambda w: early(w).sum()), mx.zeros((50, 4)), target="metal")
    assert not found.ok and not found.findings
    assert found.not_audited[0].what == "Scatter Sum" and "CustomTransforms" in found.not_audited[0].why
    assert mlxdet.audit(mx.grad(lambda w: early(w).sum()), mx.zeros((50, 4)), target="cpu").ok
    harmless = mx.checkpoint(lambda w: mx.exp(w) * 2)
    found = mlxdet.audit(mx.grad(lambda w: harmless(w).sum()), mx.zeros((50, 4)), target="metal")
    assert found.ok and "known by name" in found.notes[0]


def test_a_graph_that_is_compiled_already_is_traced_anew():
    w = mx.ones((50, 256))
    hidden = mx.compile(lambda: mx.fast.layer_norm(w, None, None, 1e-5))
    mx.eval(hidden())
    assert [f.rule for f in mlxdet.audit(lambda: hidden(), target="cuda").findings] == ["cuda-layer-norm"]


def test_operations_that_cannot_be_exported_do_not_blind_the_trace():
    def f(x, segments):
        y = mx.contiguous(x.T) * (~(x.T > 0)).astype(x.dtype)
        return mx.segmented_mm(y, y.T, segments), ~IDS, mx.bitwise_invert(IDS)

    for found in audit_targets(f, (mx.zeros((8, 8)), mx.array([[0, 4], [4, 8]])), {}).values():
        assert found.ok and not found.notes and "SegmentedMM" in found.operations


# What a model is made of


def test_adapters_and_mixtures():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.a, self.b = nn.Linear(8, 8), mx.zeros((8, 2)), mx.zeros((2, 8))
            self.base.freeze()

        def __call__(self, x):
            return self.base(x) + (x @ self.a) @ self.b

    model = Lora()
    step = nn.value_and_grad(model, lambda m, x: m(x).sum())
    assert mlxdet.audit(step, model, mx.zeros((4, 8)), target="metal").ok

    def mixture(w, x, router, k=3, sort=False):
        top = mx.argpartition(router, kth=-k, axis=-1)[..., -k:].reshape(-1)
        rows = mx.repeat(mx.arange(x.shape[0]), k)
        if sort:
            order = mx.argsort(top)
            top, rows = top[order], rows[order]
        return mx.gather_mm(x[:, None], w, lhs_indices=None if sort else rows, rhs_indices=top, sorted_indices=sort) \
            if not sort else mx.gather_mm(mx.zeros((top.size, 1, 8)), w, rhs_indices=top, sorted_indices=True)  # fmt: skip

    args = (mx.zeros((4, 8, 8)), mx.zeros((16, 8)), mx.zeros((16, 4)))
    unsorted = mlxdet.audit(mx.grad(lambda *a: mixture(*a).sum()), *args, target="metal")
    assert {f.rule for f in unsorted.findings} == {"scatter-add"}
    assert mlxdet.audit(mx.grad(lambda *a: mixture(*a, sort=True).sum()), *args, target="metal").ok


@pytest.mark.parametrize("kind", ["metal_kernel", "cuda_kernel"])
def test_user_kernels_are_not_passed(kind):
    def f(x):
        kernel = getattr(mx.fast, kind)(name="mine", input_names=["x"], output_names=["y"], source="...")
        return kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(1, 1, 1), threadgroup=(1, 1, 1))[0]  # fmt: skip

    found = mlxdet.audit(mx.grad(lambda x: mx.exp(f(x)).sum()), mx.zeros(3), target="metal")
    assert not found.ok and found.not_audited[0].what == "CustomKernel mine"


def test_a_user_kernel_made_before_is_not_passed():
    kernel = mx.fast.metal_kernel(name="mine", input_names=["x"], output_names=["y"], source="...")
    found = mlxdet.audit(
        lambda x: kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(1, 1, 1), threadgroup=(1, 1, 1)),
        mx.zeros(3), target="metal",
    )  # fmt: skip
    assert not found.ok and found.not_audited[0].what == "CustomKernel"


def test_asking_for_the_device_is_not_passed_on_a_gpu():
    def f(x):
        return mx.exp(x) if mx.default_device() == mx.cpu else x.at[IDS.reshape(-1) % 3].add(1.0)

    found = audit_targets(f, (mx.zeros(3),), {})
    assert found["cpu"].ok and not found["metal"].ok
    assert (
        found["metal"].not_audited[0].what == "mx.default_device()"
        and "test_audit.py" in found["metal"].not_audited[0].line
    )


early_norm = mx.fast.layer_norm


def test_references_taken_before_are_hooked_too():
    class Held:
        norm = None

    held = Held()
    held.norm, table, listed, cell = (
        mx.fast.layer_norm,
        {"n": mx.fast.layer_norm},
        [mx.fast.layer_norm],
        mx.fast.layer_norm,
    )
    x = mx.zeros((4, 256))
    for f in (early_norm, held.norm):
        assert f is mx.fast.layer_norm
    for f in (
        lambda x: early_norm(x, None, None, 1e-5), lambda x: held.norm(x, None, None, 1e-5),
        lambda x: table["n"](x, None, None, 1e-5), lambda x: listed[0](x, None, None, 1e-5), lambda x: cell(x, None, None, 1e-5),
    ):  # fmt: skip
        assert [f.rule for f in mlxdet.audit(f, x, target="cuda").findings] == ["cuda-layer-norm"]
    assert early_norm is held.norm is table["n"] is listed[0] is cell is mx.fast.layer_norm


def test_a_reference_that_cannot_be_hooked_is_reported():
    def f(x, norm=mx.fast.layer_norm):
        return norm(x, None, None, 1e-5)

    found = mlxdet.audit(f, mx.zeros((4, 256)), target="cuda")
    assert not found.ok and any(n.what == "mx.fast.layer_norm" for n in found.not_audited)
    g = partial(mx.fast.layer_norm, weight=None, bias=None, eps=1e-5)
    del f
    gc.collect()
    found = mlxdet.audit(lambda x: g(x), mx.zeros((4, 256)), target="cuda")
    assert not found.ok


def test_the_cudnn_switch_counts_and_is_noted(monkeypatch):
    q = mx.zeros((1, 2, 128, 64), mx.bfloat16)
    gradient = mx.grad(lambda q: mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0).sum())
    assert [f.rule for f in mlxdet.audit(gradient, q, target="cuda").findings] == ["cudnn-attention-vjp"]
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
    found = mlxdet.audit(gradient, q, target="cuda")
    assert found.ok and "MLX_CUDA_USE_CUDNN_SDPA=0" in found.notes[0]


def test_the_result_reads_well_and_is_json_able():
    import json

    found = mlxdet.audit(mx.grad(lambda w: w[IDS].sum()), mx.zeros((50, 4)), target="metal")
    assert json.loads(json.dumps(found.as_dict()))["findings"][0]["rule"] == "scatter-add"
    assert "way out: mlxdet.nn.Embedding" in str(found) and "1 can race" in str(found)


@dataclass(slots=True)
class Slotted:
    w: mx.array


def test_state_in_slots_and_globals_is_found():
    held = Slotted(mx.zeros((50, 4)))
    first = held.w

    def step():
        held.w = held.w - mx.grad(lambda w: w[IDS].sum())(held.w)

    assert [f.rule for f in mlxdet.audit(step, target="metal").findings] == ["scatter-add"]
    assert held.w is first


def test_a_function_without_a_visible_result_is_not_passed():
    assert not mlxdet.audit(lambda x: None, mx.zeros(3), target="cpu").ok


def test_other_threads_do_not_enter_the_trace():
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait()
        mx.fast.layer_norm(mx.zeros((4, 256)), None, None, 1e-5)
        done.set()

    def f(x):
        inside.set()
        assert done.wait(10)
        return mx.exp(x)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    found = mlxdet.audit(f, mx.zeros(3), target="cuda")
    thread.join()
    assert found.ok and "LayerNorm" not in found.operations


TABLE = mx.zeros((50, 4))


def test_a_global_that_two_functions_use_is_one_place():
    def inner():
        return TABLE * 2

    def outer():
        return inner() + mx.grad(lambda w: w[IDS].sum())(TABLE)

    before = TABLE
    assert [f.rule for f in mlxdet.audit(outer, target="metal").findings] == ["scatter-add"]
    assert TABLE is before
