"""make_deterministic on mlx-lm's own models, tiny and randomly initialised: Llama, Qwen3.5, its mixture of experts, LoRA.

For each: the audit flags the ordinary gradient and passes the other, values stay, gradients agree, and twenty are one.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxdet

pytest.importorskip("mlx_lm", reason="mlx-lm is optional: pip install mlx-lm")
from mlx_lm.models import gemma, llama, qwen3_5, switch_layers
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding, LoRASwitchLinear

QWEN = {
    "model_type": "qwen3_5", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 60, "linear_num_value_heads": 2,
    "linear_num_key_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "head_dim": 16,
    "tie_word_embeddings": True, "full_attention_interval": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 16,
}
LLAMA = llama.ModelArgs(
    model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
    num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=60,
)  # fmt: skip
GEMMA = gemma.ModelArgs(
    model_type="gemma", hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, head_dim=16,
    rms_norm_eps=1e-6, vocab_size=60, num_key_value_heads=1,
)  # fmt: skip
MODELS = {
    "llama": lambda: llama.Model(LLAMA),
    "gemma": lambda: gemma.Model(GEMMA),
    "qwen3.5": lambda: qwen3_5.Model(qwen3_5.ModelArgs.from_dict(QWEN)),
    "qwen3.5 experts": lambda: qwen3_5.Model(qwen3_5.ModelArgs.from_dict(QWEN | EXPERTS)),
}
IDS = mx.array(np.random.default_rng(0).integers(0, 60, (2, 7)) ** 2 // 60)


def build(name):
    mx.random.seed(1)
    model = MODELS[name]()
    model.train()
    mx.eval(model.parameters())
    return model


def step(model):
    def loss(model):
        return nn.losses.cross_entropy(model(IDS[:, :-1]).astype(mx.float32), IDS[:, 1:], reduction="mean")

    return nn.value_and_grad(model, loss)(model)


def relative(got, want):
    got, want = (dict(tree_flatten(t)) for t in (got, want))
    assert got.keys() == want.keys()
    a, b = (np.concatenate([np.array(t[k]).reshape(-1) for k in sorted(t)]).astype(np.float64) for t in (got, want))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_flagged_before_clean_after_and_the_same_model(backend, name, target):
    model = build(name)
    value, grads = step(model)
    mx.eval(value, grads)
    before = dict(tree_flatten(model.parameters()))
    assert mlxdet.audit(step, model, target=target).findings
    report = mlxdet.make_deterministic(model, target)
    assert not report.left, str(report)
    audit = mlxdet.audit(step, model, target=target)
    assert audit.ok, str(audit)
    after = dict(tree_flatten(model.parameters()))
    assert list(before) == list(after) and all(after[k] is before[k] for k in before)
    again, got = step(model)
    assert float(again) == pytest.approx(float(value), rel=1e-6) and relative(got, grads) < 1e-6


@pytest.mark.parametrize("name", ["llama", "qwen3.5 experts"])
def test_twenty_gradients_are_one(backend, name):
    model = build(name)
    mlxdet.make_deterministic(model, "metal")
    assert mlxdet.assert_repeatable(step, model, n=20).identical == 20


def experts(kind, bias):
    """A routed layer whose biases, if it has any, are not zero."""
    mx.random.seed(2)
    layer = kind(8, 16, 5, bias=bias)
    for name, p in tree_flatten(layer.parameters()):
        if name.endswith("bias"):
            layer.load_weights([(name, mx.random.normal(p.shape))], strict=False)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])  # mlx-lm sorts from 64 indices on
@pytest.mark.parametrize("kind", ["SwitchGLU", "SwitchMLP"])
def test_experts_agree_and_have_no_float_scatter(backend, kind, tokens, bias):
    rng = np.random.default_rng(tokens)
    layer = experts(getattr(switch_layers, kind), bias)
    x = mx.array(rng.standard_normal((2, tokens, 8)).astype(np.float32))
    chosen = mx.array(np.stack([rng.permutation(5)[:3] for _ in range(2 * tokens)]).reshape(2, tokens, 3))

    def gradients(p, x):
        def run(p, x):
            return (layer.update(p)(x, chosen) ** 2).sum()

        return mx.value_and_grad(run, argnums=(0, 1))(p, x)

    want = gradients(layer.parameters(), x)
    mx.eval(want)
    for target in ("metal", "cuda"):
        assert mlxdet.audit(gradients, layer.parameters(), x, target=target).findings
    assert not mlxdet.make_deterministic(layer, "metal").left
    got = gradients(layer.parameters(), x)
    assert relative(got, want) < 1e-6
    for target in ("metal", "cuda"):
        audit = mlxdet.audit(gradients, layer.parameters(), x, target=target)
        assert audit.ok, str(audit)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_one_routed_layer_alone(backend, quantized, lora):
    """Unsorted indices, with the input broadcast over the experts of a token."""
    mx.random.seed(4)
    layer = switch_layers.SwitchLinear(64, 32, 5)
    layer.bias = mx.random.normal((5, 32))
    layer = layer.to_quantized(32, 4) if quantized else layer
    if lora:
        layer = LoRASwitchLinear.from_base(layer, r=4)
        layer.lora_b = mx.random.normal(layer.lora_b.shape)
    x, chosen = (
        mx.random.normal((6, 1, 1, 64)),
        mx.array([[0, 3, 1], [1, 2, 0], [4, 3, 2], [0, 1, 2], [0, 4, 1], [3, 2, 0]]),
    )

    def gradients(p, x):
        def run(p, x):
            return (layer.update(p)(x, chosen) ** 2).sum()

        return mx.value_and_grad(run, argnums=(0, 1))(p, x)

    p = layer.trainable_parameters()
    want = gradients(p, x)
    mx.eval(want)
    plain = layer(x, chosen)
    report = mlxdet.make_deterministic(layer, "metal")
    assert report.replaced and not report.left
    got = layer(x, chosen)
    assert got.shape == plain.shape and relative({"y": got}, {"y": plain}) < 1e-6
    assert relative(gradients(p, x), want) < 1e-6
    audit = mlxdet.audit(gradients, p, x, target="metal")
    assert audit.ok, str(audit)


@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
def test_adapters_of_an_embedding(backend, kind):
    mx.random.seed(5)
    layer = kind.from_base(nn.Embedding(30, 16), r=4)
    layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.1

    def gradients(p):
        return mx.value_and_grad(lambda p: (layer.update(p)(IDS[:, :5] // 2) ** 3).sum())(p)

    want = gradients(layer.parameters())
    mx.eval(want)
    assert mlxdet.audit(gradients, layer.parameters(), target="metal").findings
    report = mlxdet.make_deterministic(layer, "metal")
    assert {p for r in report.replaced for p in r.paths} == {"", "embedding"} and isinstance(layer, kind)
    assert relative(gradients(layer.parameters()), want) < 1e-6
    audit = mlxdet.audit(gradients, layer.parameters(), target="metal")
    assert audit.ok, str(audit)


def test_another_version_of_the_experts_is_left_and_named(backend, monkeypatch):
    class SwitchGLU(nn.Module):
        def __call__(self, x, indices):
            return x

    monkeypatch.setattr(switch_layers, "SwitchGLU", SwitchGLU)
    (left,) = mlxdet.make_deterministic(SwitchGLU(), "metal").left
    assert "another version" in left.why
