"""make_deterministic: what it replaces, what it keeps as it was, what it leaves and says so."""

import copy
import os
import subprocess
import sys
import types

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxdet
from mlxdet import UsageError, make_deterministic
from mlxdet.nn import Embedding

PLAIN = "from plain operations"


class Net(nn.Module):
    """A small language model: tokens, a tied head, a shared norm, attention, a convolution."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layers = [nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2)]
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.RMSNorm(16)
        self.extra = {"again": self.norm}
        self.same_tokens = self.tokens

    def __call__(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, None)
        return self.same_tokens.as_linear(self.extra["again"](self.mix(x)))


IDS = mx.array([[1, 2, 1, 1, 5, 1], [2, 2, 2, 7, 1, 0]])


def loss(model, ids=IDS):
    return nn.losses.cross_entropy(model(ids), ids, reduction="mean")


def weights(model):
    return dict(tree_flatten(model.parameters()))


def relative(got, want):
    got, want = (dict(tree_flatten(t)) for t in (got, want))
    assert got.keys() == want.keys()
    a, b = (np.concatenate([np.array(t[k]).reshape(-1) for k in sorted(t)]).astype(np.float64) for t in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def replaced(report):
    return {path: r.now for r in report.replaced for path in r.paths}


def test_on_metal_the_embedding_is_replaced_and_nothing_else(backend):
    model = Net()
    report = make_deterministic(model, "metal")
    assert [(r.paths, r.was, r.now) for r in report.replaced] == [
        (("same_tokens", "tokens"), "mlx.nn.Embedding", "mlxdet.nn.Embedding")
    ]
    assert not report.left and type(model.tokens) is Embedding and type(model.norm) is nn.RMSNorm


def test_on_cuda_norms_and_convolutions_are_replaced_as_well(backend):
    model = Net()
    report = make_deterministic(model, "cuda")
    assert {p: n.rpartition(".")[2] for p, n in replaced(report).items()} == {
        "tokens": "Embedding",
        "same_tokens": "Embedding",
        **{f"layers.{i}.ln{j}": "LayerNorm" for i in (0, 1) for j in (1, 2)},
        "mix": "Conv1d",
        "norm": "RMSNorm",
        "extra.again": "RMSNorm",
    }
    assert not report.left


def test_on_the_cpu_nothing_leaks_and_nothing_changes(backend):
    model = Net()
    classes = [type(m) for m in model.modules()]
    for report in (make_deterministic(model), make_deterministic(model, "cpu")):
        assert (report.target, report.replaced, report.left, report.settings) == ("cpu", [], [], [])
    assert classes == [type(m) for m in model.modules()]


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_the_model_computes_what_it_did_and_its_gradients_agree(backend, target):
    model = Net()
    value, grads = nn.value_and_grad(model, loss)(model)
    mx.eval(value, grads)
    make_deterministic(model, target)
    again, got = nn.value_and_grad(model, loss)(model)
    assert float(again) == pytest.approx(float(value), rel=1e-6)
    assert relative(got, grads) < 1e-6


def test_parameters_are_the_same_arrays_under_the_same_names(backend, tmp_path):
    model = Net()
    before, names = weights(model), [k for k, _ in tree_flatten(model.parameters())]
    model.save_weights(str(tmp_path / "before.safetensors"))
    make_deterministic(model, "cuda")
    after = weights(model)
    assert names == [k for k, _ in tree_flatten(model.parameters())] and all(after[k] is before[k] for k in before)
    model.update({"mix": {"bias": mx.ones((16,))}})
    model.load_weights(str(tmp_path / "before.safetensors"))  # strict
    assert all(mx.array_equal(v, before[k]) for k, v in weights(model).items())


def test_shared_modules_stay_shared_and_references_from_outside_hold(backend):
    model = Net()
    outside, bound = model.tokens, model.tokens.as_linear
    make_deterministic(model, "cuda")
    assert model.tokens is model.same_tokens is outside is bound.__self__
    assert model.extra["again"] is model.norm
    model.tokens.weight = mx.zeros((20, 16))
    assert not model.same_tokens.weight.any()


def test_frozen_and_training_state_stay(backend):
    model = Net()
    model.eval()
    model.layers[0].freeze()
    model.tokens.freeze()
    trainable = [k for k, _ in tree_flatten(model.trainable_parameters())]
    make_deterministic(model, "cuda")
    assert [k for k, _ in tree_flatten(model.trainable_parameters())] == trainable
    assert "tokens.weight" not in trainable and trainable
    assert not any(m.training for m in model.modules())
    model.unfreeze()
    assert "tokens.weight" in dict(tree_flatten(model.trainable_parameters()))


def test_a_second_call_changes_nothing(backend):
    model = Net()
    make_deterministic(model, "cuda")
    classes = [type(m) for m in model.modules()]
    report = make_deterministic(model, "cuda")
    assert not report.replaced and not report.left and classes == [type(m) for m in model.modules()]


def test_the_model_itself_can_be_the_layer(backend):
    layer = nn.Embedding(5, 2)
    assert make_deterministic(layer, "metal").replaced[0].paths == ("",)
    assert type(layer) is Embedding and "the model itself" in str(make_deterministic(nn.Embedding(5, 2), "metal"))


def test_a_copy_of_a_replaced_model_works(backend):
    model = nn.Sequential(nn.Embedding(20, 16), OwnNorm(16), Named(5, 2))
    model.layers[2].parent = model.layers[0]
    make_deterministic(model, "cuda")
    twin = copy.deepcopy(model)
    assert [type(m) for m in twin.layers] == [type(m) for m in model.layers]
    assert twin.layers[2].parent is twin.layers[0] is not model.layers[0]
    assert mx.array_equal(twin.layers[1](twin.layers[0](IDS)), model.layers[1](model.layers[0](IDS)))


def test_training_steps_agree_with_those_of_the_ordinary_model(backend):
    ends = []
    for target in (None, "metal", "cuda"):
        mx.random.seed(0)
        model = Net()
        if target:
            make_deterministic(model, target)
        optimizer = optim.SGD(0.1)
        for _ in range(3):
            optimizer.update(model, nn.value_and_grad(model, loss)(model)[1])
        ends.append(model.parameters())
    assert relative(ends[1], ends[0]) < 1e-6 and relative(ends[2], ends[0]) < 1e-6


class Scaled(nn.Embedding):
    def __call__(self, x):
        return self.weight[x] * 8.0


class Named(nn.Embedding):
    def rows(self):
        return self.weight.shape[0]


class Over(Embedding):
    def __call__(self, x):
        return super().__call__(x) * 8.0


def test_a_subclass_with_a_call_of_its_own_is_left_and_named(backend):
    model = nn.Sequential(Scaled(5, 2))
    report = make_deterministic(model, "metal")
    assert type(model.layers[0]) is Scaled and not report.replaced
    (left,) = report.left
    assert left.paths == ("layers.0",) and left.what.endswith("Scaled")
    assert "of its own" in left.why and "mlxdet.nn.Embedding" in left.remedy
    assert "0 modules replaced, 1 module left" in str(report) and "Scaled" in str(report)


def test_a_subclass_that_inherits_its_call_is_replaced_and_keeps_its_methods(backend):
    model = nn.Sequential(Named(5, 2))
    assert make_deterministic(model, "metal").replaced
    layer = model.layers[0]
    assert isinstance(layer, Named) and isinstance(layer, Embedding) and layer.rows() == 5
    assert type(layer).__call__ is Embedding.__call__


def test_a_subclass_of_the_drop_in_is_known_to_be_safe(backend):
    report = make_deterministic(nn.Sequential(Over(5, 2)), "cuda")
    assert not report.replaced and not report.left


class OwnNorm(nn.Module):
    """Calls the fused norm itself, as Gemma's does."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.zeros((dims,))

    def __call__(self, x):
        return mx.fast.rms_norm(x, 1.0 + self.weight, 1e-6)


def helper(x, weight):
    return mx.fast.layer_norm(x, weight, None, 1e-5) * 2


class ThroughHelper(OwnNorm):
    def __call__(self, x):
        return helper(super().__call__(x), self.weight)


tools = types.ModuleType("tools")
tools.helper = helper


class ThroughModule(OwnNorm):
    def __call__(self, x):
        return tools.helper(x, self.weight)


class OneAdded(nn.RMSNorm):
    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight + 1, self.eps)


class Doubled(nn.RMSNorm):
    def __call__(self, x):
        return super().__call__(x) * 2


def fused(calls, monkeypatch, module, x):
    """Return the names of the fused norms that the module really calls."""
    seen = []
    for name in ("rms_norm", "layer_norm"):
        real = getattr(mx.fast, name)
        monkeypatch.setattr(mx.fast, name, lambda *a, _n=name, _r=real, **k: (seen.append(_n), _r(*a, **k))[1])
    y = module(x)
    monkeypatch.undo()
    calls.append(sorted(seen))
    return y


@pytest.mark.parametrize(
    "kind, before, now",
    [
        (OwnNorm, ["rms_norm"], "mx.fast.rms_norm from plain operations"),
        (OneAdded, ["rms_norm"], "mx.fast.rms_norm from plain operations"),
    ],
)
def test_fused_norms_in_the_code_of_a_module_are_replaced_on_cuda(backend, monkeypatch, kind, before, now):
    x, module, calls = mx.random.normal((3, 8)), kind(8), []
    want = fused(calls, monkeypatch, module, x)
    assert not make_deterministic(module, "metal").replaced
    assert [r.now for r in make_deterministic(module, "cuda").replaced] == [now]
    got = fused(calls, monkeypatch, module, x)
    assert calls == [before, []] and isinstance(module, kind)
    assert relative({"y": got}, {"y": want}) < 1e-6
    assert fused(calls, monkeypatch, kind(8), x) is not None and calls[-1] == before  # other instances are untouched


def test_and_in_functions_that_it_calls(backend, monkeypatch):
    class Plain(nn.Module):
        def __call__(self, x):
            return helper(x, mx.ones((8,)))

    x, module, calls = mx.random.normal((3, 8)), Plain(), []
    want = fused(calls, monkeypatch, module, x)
    assert make_deterministic(module, "cuda").replaced and not make_deterministic(module, "cuda").left
    got = fused(calls, monkeypatch, module, x)
    assert calls == [["layer_norm"], []] and relative({"y": got}, {"y": want}) < 1e-6
    assert helper.__globals__["mx"] is mx  # the function itself is as it was


@pytest.mark.parametrize("kind", [ThroughModule, Doubled, ThroughHelper])
def test_what_cannot_be_reached_is_left_and_named(backend, kind):
    module = kind(8)
    report = make_deterministic(module, "cuda")
    assert len(report.left) == 1 and "mlxdet.nn" in report.left[0].remedy
    assert type(module) is kind and not report.replaced


def test_gated_delta_update_is_replaced_on_metal(backend):
    class Delta(nn.Module):
        def __call__(self, q, k, v, g, b):
            return mx.fast.gated_delta_update(q, k, v, g, b)[0]

    module = Delta()
    q, k, v = (mx.random.normal((1, 3, 2, 32)) * 0.1 for _ in range(3))
    g, b = mx.sigmoid(mx.random.normal((2, 1, 3, 2)))
    want = module(q, k, v, g, b)
    (done,) = make_deterministic(module, "metal").replaced
    assert done.now == "mx.fast.gated_delta_update from plain operations" and "atomics" in done.why
    assert relative({"y": module(q, k, v, g, b)}, {"y": want}) < 1e-6


def test_what_has_no_replacement_is_left_and_named(backend):
    class WithKernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = mx.fast.metal_kernel(
                name="twice", input_names=["x"], output_names=["y"], source="y[0] = 2 * x[0];"
            )

    class Experts(nn.Module):
        def __call__(self, x, indices):
            return mx.gather_mm(x, self.weight, rhs_indices=indices)

    quantized = nn.QuantizedEmbedding(64, 64)
    trainable = nn.QuantizedEmbedding(64, 64)
    trainable.unfreeze(keys=["scales"])
    cases = {
        "kernel": (WithKernel(), "kernel of its own"),
        "experts": (Experts(), "gather_mm"),
        "pool": (nn.MaxPool1d(3, stride=2), "overlap"),
        "apart": (nn.MaxPool1d(3, stride=3), None),
        "up": (nn.Upsample(2, mode="linear"), "gather"),
        "nearest": (nn.Upsample(2), None),
        "quantized": (quantized, None),
        "trainable": (trainable, "scales"),
        "linear": (nn.Linear(2, 2), None),
    }
    model = nn.Module()
    for name, (module, _) in cases.items():
        model[name] = module
    report = make_deterministic(model, "metal")
    found = {left.paths[0]: left.why for left in report.left}
    assert found.keys() == {name for name, (_, why) in cases.items() if why}
    assert all(cases[name][1] in why for name, why in found.items()) and not report.replaced
    assert not make_deterministic(model, "cpu").left
    (transposed,) = make_deterministic(nn.ConvTranspose1d(2, 2, 2), "cuda").left
    assert "cuDNN" in transposed.why


def test_settings_that_are_not_in_force_are_told(backend, monkeypatch):
    for name in ("MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA"):
        monkeypatch.delenv(name, raising=False)
    lines = make_deterministic(Net(), "cuda").settings
    assert [line.split()[0] for line in lines] == ["MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA"]
    assert all("before" in line and "not 0" in line for line in lines)
    assert "MLX_CUDA_USE_CUDNN_SDPA" in str(make_deterministic(Net(), "cuda"))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setenv("MLX_SDPA_BLOCKS", "8")
    assert [line.split()[0] for line in make_deterministic(Net(), "metal").settings] == ["MLX_SDPA_BLOCKS"]
    monkeypatch.delenv("MLX_SDPA_BLOCKS")
    assert make_deterministic(Net(), "metal").settings == []


def test_wrong_use_is_refused_before_anything_changes(backend):
    model = Net()
    with pytest.raises(UsageError, match="metal, cuda, cpu"):
        make_deterministic(model, "gpu")
    with pytest.raises(UsageError, match=r"mlx\.nn\.Module, not dict"):
        make_deterministic({"weight": mx.ones((2,))})
    assert type(model.tokens) is nn.Embedding


def test_the_names_are_at_the_top(backend):
    assert mlxdet.nn.Embedding is Embedding and mlxdet.make_deterministic is make_deterministic
    assert {"nn", "make_deterministic", "assert_repeatable"} <= set(dir(mlxdet)) and "mlxdet.nn" in sys.modules


def test_it_works_beside_plain_mlx_and_says_what_is_not_pinned():
    code = (
        "import sys, mlxdet\n"
        "assert 'mlx.core' not in sys.modules\n"
        "import mlx.core as mx, mlx.nn as nn\n"
        "layer = nn.Embedding(5, 2)\n"
        "report = mlxdet.make_deterministic(layer, 'cuda')\n"
        "print(type(layer).__module__, [line.split()[0] for line in report.settings], layer(mx.array([1, 1])).shape)\n"
        "print(mlxdet.backends._active)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert done.stdout.splitlines() == [
        "mlxdet.nn.embedding ['MLX_ENABLE_TF32', 'MLX_CUDA_USE_CUDNN_SDPA'] (2, 2)",
        "None",
    ], done.stderr
