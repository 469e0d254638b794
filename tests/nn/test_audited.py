"""The audit and the drop-ins together: what is flagged in a model is gone after make_deterministic."""

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxdet
from mlxdet.nn import lookup

IDS = mx.array([[1, 2, 1, 1, 5, 1], [2, 2, 2, 7, 1, 0]])


class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.tokens = nn.Embedding(20, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.last = nn.RMSNorm(width)

    def __call__(self, ids):
        return self.tokens.as_linear(self.last(self.mix(self.norm(self.tokens(ids)))))


def step(model):
    def loss(model):
        return nn.losses.cross_entropy(model(IDS), IDS, reduction="mean")

    return nn.value_and_grad(model, loss)(model)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("target, more", [("metal", set()), ("cuda", {"LayerNorm", "RMSNorm", "Convolution"})])
def test_flagged_before_clean_after(backend, target, more, dtype):
    model = Net()
    model.set_dtype(dtype)
    before = mlxdet.audit(step, model, target=target)
    assert {"Scatter sum", *more} <= {name.removesuffix("VJP") for name in (f.primitive for f in before.findings)}
    mlxdet.make_deterministic(model, target)
    after = mlxdet.audit(step, model, target=target)
    assert after.ok, str(after)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_lookup_is_clean_on_its_own_and_compiled(backend, compiled):
    def gradient(rows, table):
        def run(t):
            return mx.grad(lambda t: (rows(t, IDS) ** 2).sum())(t)

        return (mx.compile(run) if compiled else run)(table)

    table = mx.zeros((20, 4))
    for target in ("metal", "cuda"):
        assert mlxdet.audit(lambda t: gradient(lambda t, i: t[i], t), table, target=target).findings
        audit = mlxdet.audit(lambda t: gradient(lookup, t), table, target=target)
        assert audit.ok, str(audit)
