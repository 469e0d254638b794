"""The trainer's own step for every device, and the verb."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxdet import config as configs
from mlxdet.backends import Backend
from mlxdet.config import TrainConfig
from mlxdet.errors import Fault
from mlxdet.model import embedding, ops
from mlxdet.training.audit import audit_for_start, audit_step
from tests.conftest import mlxdet

TARGETS = ("metal", "cuda", "cpu")


def config(**values):
    return TrainConfig.of(**values).resolve()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["nano", "tiny", "small", "medium", "large"])
def test_no_preset_has_a_leak(preset, dtype, target):
    mx.reset_peak_memory()
    found = audit_step(config(preset=preset, dtype=dtype), 256, target)
    assert found.ok and found.primitives > 300, str(found)
    assert mx.get_peak_memory() < 1 << 20  # the large preset has 76 million weights, and none was made


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "values",
    [{"dropout": 0.2}, {"accumulation": 5}, {"neftune_alpha": 5.0}, {"grad_clip": 0.0}, {"depth": 3},
     {"dropout": 0.1, "accumulation": 3, "dtype": "bfloat16", "neftune_alpha": 1.0}],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [256, 5000])  # one-hot product, and fixed point or the CPU's scatter
def test_no_switch_adds_a_leak(values, target, vocab):
    found = audit_step(config(preset="nano", **values), vocab, target)
    assert found.ok, str(found)


def test_default_kernels_leak_exactly_where_the_contract_says():
    """Width 128: at more, the rule of CUDA's LayerNorm fires too, in float32."""
    for dtype in ("float32", "bfloat16"):
        values = {"preset": "tiny", "dtype": dtype, "kernels": "default"}
        found = {t: audit_step(config(**values), 256, t) for t in TARGETS}
        assert found["cpu"].ok
        table = found["metal"].findings
        assert [(f.rule, f.where) for f in table] == [("scatter-add", "gradient of weights.token_embedding.weight")]
        more = [("cudnn-attention-vjp", 4)] if dtype == "bfloat16" else []
        assert [(f.rule, f.count) for f in found["cuda"].findings] == [("scatter-add", 1), *more]
    wide = audit_step(config(preset="small", kernels="default"), 256, "cuda")
    assert {f.rule for f in wide.findings} == {"scatter-add", "cuda-layer-norm"}


def test_a_leak_in_the_step_is_found_and_refused_at_start(monkeypatch):
    """The negative control: the deterministic step with MLX's scatter as its embedding gradient."""
    monkeypatch.setitem(embedding.METHODS, "onehot", embedding.scatter)
    small = config(preset="nano")
    found = audit_step(small, 256, "metal")
    assert [f.rule for f in found.findings] == ["scatter-add"]
    with pytest.raises(Fault, match=r"can give different bits on metal: Scatter sum .*token_embedding"):
        audit_for_start(small, 256, Backend("metal", "deterministic"))
    assert audit_for_start(small, 256, Backend("metal", "default"))["ok"] is False  # recorded, not refused
    assert audit_for_start(small, 256, Backend("cpu", "deterministic"))["ok"] is True


def test_a_fused_norm_or_attention_on_cuda_is_found(monkeypatch):
    monkeypatch.setattr(ops.norms, "layer_norm", mx.fast.layer_norm)
    monkeypatch.setattr(ops.plain, "attention", ops._fused_attention)
    found = audit_step(config(preset="small", dtype="bfloat16", width=512, heads=8), 256, "cuda")
    assert {f.rule for f in found.findings} == {"cuda-layer-norm", "cudnn-attention-vjp"}


def test_every_setting_that_decides_bits_leaves_the_step_without_a_leak():
    """Each choice of each switch, and both ends of each number that has them."""
    base = {"preset": "nano", "layers": 1, "context": 16, "batch": 2, "steps": 50}
    for name, field in configs.FIELDS.items():
        if field.comfort or name in (*base, "kernels", "device", *configs.TUNE, *configs.ROWS):
            continue
        for value in field.choices or ([field.low] if field.low and field.kind is float else []):
            for target in ("metal", "cuda"):
                values = base | {name: value}
                assert audit_step(config(**values), 256, target).ok, values


@pytest.mark.parametrize("objective", ["lm", "sft", "dpo", "orpo", "simpo"])
@pytest.mark.parametrize("lora", [{}, {"base": "x", "lora_rank": 4}])
@pytest.mark.parametrize("vocab", [256, 5000])
def test_no_objective_has_a_leak_with_adapters_or_without(objective, lora, vocab):
    """And the control arm has it where the embedding is trained, and only there: with LoRA it is frozen."""
    base = {"preset": "nano", "layers": 1, "context": 16, "batch": 2, "steps": 50, "accumulation": 2}
    more = {"base": "x"} if objective == "dpo" else {"dropout": 0.1} | ({"lora_dropout": 0.1} if lora else {})
    for packing in (False, True) if objective == "sft" else (False,):
        values = base | more | lora | {"objective": objective, "packing": packing}
        for target in ("metal", "cuda"):
            assert (found := audit_step(config(**values), vocab, target)).ok and found.primitives > 100, str(found)
        control = audit_step(config(**values, kernels="default"), vocab, "metal")
        tables = {f.where.split(".", 1)[1] for f in control.findings}
        assert tables == (set() if lora else {"token_embedding.weight"} | (
            {"position_embedding.weight"} if packing else set())), str(control)  # fmt: skip


def test_the_audit_leaves_the_step_as_it_was(backend):
    from mlxdet.data.batches import Batch
    from mlxdet.training.step import TrainStep, initial_state

    small = config(preset="nano", layers=1, width=16, heads=2, context=12, mlp=32, batch=4)
    batch = Batch(1, np.ones((1, 4, 13), np.int32), np.arange(4), "")
    step, state = TrainStep(small, 40, backend), initial_state(small, 40)
    before = step(state, batch)[1].loss.item()
    audit_step(small, 40, "cuda")
    assert step(state, batch)[1].loss.item() == before
    assert TrainStep(small, 40, backend)(state, batch)[1].loss.item() == before


# The verb


def test_the_verb_passes_the_trainers_step():
    done = mlxdet("audit", "--preset", "nano")
    assert done.returncode == 0 and "Nothing can race on metal, cuda, cpu." in done.stdout


def test_the_verb_fails_on_a_leak_and_names_it():
    done = mlxdet("audit", "--preset", "nano", "--kernels", "default", "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["ok"] is False and said["targets"]["cpu"]["ok"] is True
    assert said["targets"]["metal"]["findings"][0]["rule"] == "scatter-add"


EXAMPLE = """
import mlx.core as mx

def leak():
    return mx.grad(lambda w, ids: w[ids].sum()), (mx.zeros((10, 4)), mx.array([1, 2, 3]))

def nothing():
    return 3
"""


def test_the_verb_audits_other_peoples_code(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(EXAMPLE)
    done = mlxdet("audit", f"{file}:leak", "--target", "metal")
    assert done.returncode == 1 and "scatter-add" in done.stdout and "theirs.py:5" in done.stdout
    assert mlxdet("audit", f"{file}:leak", "--target", "metal", "--real-inputs").returncode == 0
    for bad, why in (("nothing", "must return (fn, args)"), ("absent", "has no absent")):
        done = mlxdet("audit", f"{file}:{bad}")
        assert done.returncode == 2 and why in done.stderr and not done.stdout
    assert "write MODULE:FUNCTION" in mlxdet("audit", "theirs").stderr


@pytest.mark.parametrize(
    "command", ["audit --preset small --dtype bfloat16", "audit my_training:audited --target metal"]
)
def test_the_page_shows_what_the_verb_says(command, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    (tmp_path / "my_training.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    shown = page.split(f"    $ mlxdet {command}\n")[1].split("\n\n`")[0].split("\n\nIt ")[0]
    said = "\n".join(f"    {line}".rstrip() for line in mlxdet(*command.split()).stdout.rstrip().split("\n"))
    # How many operations a step has is no promise.
    assert re.sub(r"(metal|cuda|cpu) +\d+", r"\1", shown.rstrip()) == re.sub(r"(metal|cuda|cpu) +\d+", r"\1", said)
