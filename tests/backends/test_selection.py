"""Which device is chosen, what is pinned, and what comes too late."""

import json
import subprocess
import sys

import pytest

from mlxdet import backends
from mlxdet.backends import Backend, Facts, cuda, doctor, metal, select
from mlxdet.errors import UsageError


def facts(system="Linux", machine="x86_64", wheels=("mlx", "mlx-cpu"), nvidia=False):
    return Facts(system, machine, frozenset(wheels), nvidia)


MAC = {"system": "Darwin", "machine": "arm64", "wheels": ("mlx", "mlx-metal")}
CUDA = {"wheels": ("mlx", "mlx-cuda-13"), "nvidia": True}


@pytest.mark.parametrize(
    "device, here, chosen",
    [
        ("auto", MAC, "metal"),
        ("auto", MAC | {"machine": "x86_64"}, "cpu"),
        ("auto", {}, "cpu"),
        ("auto", CUDA, "cuda"),
        ("auto", CUDA | {"nvidia": False}, "cpu"),
        ("cpu", MAC, "cpu"),
        ("cpu", CUDA, "cpu"),
        ("cuda", {"wheels": ("mlx", "mlx-cuda-12"), "nvidia": True}, "cuda"),
        ("metal", MAC, "metal"),
    ],
)
def test_the_device(device, here, chosen):
    assert select(device, facts(**here)) == chosen


@pytest.mark.parametrize(
    "device, here, said",
    [
        ("auto", {"wheels": ()}, r"MLX is not installed; pip install 'mlxdet\[cpu\]'"),
        ("auto", {"wheels": ("mlx",)}, r"no backend installed; pip install 'mlxdet\[cpu\]'"),
        ("auto", {"wheels": ("mlx",), "nvidia": True}, r"no backend installed; pip install 'mlxdet\[cuda\]'"),
        ("auto", MAC | {"wheels": ()}, "MLX is not installed; pip install mlxdet"),
        ("cuda", {}, r"no cuda backend installed; pip install 'mlxdet\[cuda\]'"),
        ("cuda", CUDA | {"nvidia": False}, "no NVIDIA driver"),
        ("cuda", MAC, "under Linux only"),
        ("metal", {}, "Metal is on Apple silicon only"),
        ("metal", MAC | {"machine": "x86_64"}, "no metal backend"),
    ],
)
def test_what_is_not_here_is_one_line_with_the_way_out(device, here, said):
    with pytest.raises(UsageError, match=said) as caught:
        select(device, facts(**here))
    assert "\n" not in str(caught.value)


def test_choices_by_device():
    cpu, gpu, apple = (
        Backend("cpu", "deterministic"),
        Backend("cuda", "deterministic"),
        Backend("metal", "deterministic"),
    )
    assert [b.embedding_method(1024, 1) for b in (cpu, gpu, apple)] == ["onehot"] * 3
    assert [b.embedding_method(1025, 1) for b in (cpu, gpu, apple)] == ["scatter", "fixedpoint", "fixedpoint"]
    assert (gpu.norms, gpu.attention) == ("plain", "plain")
    assert (apple.norms, apple.attention, cpu.norms) == ("fast", "fast", "fast")
    control = Backend("cuda", "default")
    assert (control.norms, control.attention) == ("fast", "fast")


def test_pins_are_checked_before_any_is_set(monkeypatch):
    table = {
        "MLXDET_TEST_A": ("1", "first"),
        "MLXDET_TEST_B": ("0", "it matters"),
        "MLXDET_TEST_C": (None, "not at all"),
    }
    monkeypatch.setenv("MLXDET_TEST_B", "7")
    monkeypatch.delenv("MLXDET_TEST_A", raising=False)
    import os

    with pytest.raises(UsageError, match=r"MLXDET_TEST_B=7 is set, but must be 0: it matters\. Unset it"):
        backends._pin(table, late=False)
    assert "MLXDET_TEST_A" not in os.environ
    monkeypatch.setenv("MLXDET_TEST_B", "0")
    monkeypatch.setenv("MLXDET_TEST_C", "x")
    with pytest.raises(UsageError, match="MLXDET_TEST_C=x is set, but must be unset"):
        backends._pin(table, late=False)
    monkeypatch.delenv("MLXDET_TEST_C")
    with pytest.raises(UsageError, match="MLXDET_TEST_A=1 comes too late"):
        backends._pin(table, late=True)
    assert "MLXDET_TEST_A" not in os.environ
    monkeypatch.setenv("MLXDET_TEST_A", "1")
    backends._pin(table, late=True)  # already right when MLX was imported
    monkeypatch.delenv("MLXDET_TEST_A")
    backends._pin(table, late=False)
    assert os.environ["MLXDET_TEST_A"] == "1"


def test_what_the_gpus_pin():
    assert cuda.pins("deterministic")["MLX_CUDA_USE_CUDNN_SDPA"][0] == "0"
    assert "MLX_CUDA_USE_CUDNN_SDPA" not in cuda.pins("default")
    for table in (cuda.pins("deterministic"), cuda.pins("default"), metal.pins("default")):
        assert table["MLX_ENABLE_TF32"][0] == "0"
        assert all(reason for _, reason in table.values())


def python(code, **env):
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_mlx():
    code = "import sys, mlxdet, mlxdet.backends, mlxdet.config, mlxdet.training.run; print('mlx.core' in sys.modules)"
    assert python(code) == "False"


def test_a_late_pin_is_an_error_in_a_real_process():
    """As on a GPU: MLX is imported first, then a device whose pins are not in place is activated."""
    code = """
import mlx.core
from mlxdet import backends
from mlxdet.errors import UsageError
backends.select = lambda device: "cuda"
try: backends.activate("cuda"); print("accepted")
except UsageError as e: print(e)
"""
    assert "MLX_ENABLE_TF32=0 comes too late" in python(code)


def test_mlx_before_mlxdet_on_the_cpu_is_said_not_silent():
    code = """
import warnings, mlx.core
from mlxdet import backends
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    b = backends.activate("cpu")
print(len(seen), b.blas["name"])
"""
    if sys.platform == "linux":
        assert python(code) == "1 MLX's own"
        late = "import mlx.core\nfrom mlxdet import backends\ntry: backends.activate('cpu')\nexcept Exception as e: print(e)"
        assert "MLXDET_BLAS comes too late" in python(late, MLXDET_BLAS="/some/lib.so")


def test_activation_is_idempotent(backend):
    assert backends.activate("cpu") is backend
    other = backends.activate("cpu", "default")
    assert other.kernels == "default" and other.blas == backend.blas
    assert backends.activate("cpu", "deterministic").blas == backend.blas


def test_the_fingerprint_holds_what_decides_and_nothing_private(backend, monkeypatch):
    import getpass
    import platform

    a = backend.fingerprint()
    text = json.dumps(a["decides"])
    assert platform.node() not in text and "/home" not in text
    assert getpass.getuser() not in text or getpass.getuser() == "root"
    assert a["decides"]["mlx"] and a["decides"]["device"] == "cpu" and a == backend.fingerprint()
    monkeypatch.setenv("MLX_BFS_MAX_WIDTH", "3")
    assert backend.fingerprint()["decides"] == a["decides"]
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert backend.fingerprint()["decides"] != a["decides"]


def test_advice():
    assert doctor.advice("cpu", {"name": "scipy-openblas32"}, "g++", facts()) == []
    slow = doctor.advice("cpu", {"name": "MLX's own", "why": "nothing found"}, None, facts())
    assert len(slow) == 2 and "mlxdet[cpu]" in slow[0] and "install g++" in slow[1]
    assert "mlxdet[cuda]" in doctor.advice("cpu", {"name": "x"}, "g++", facts(nvidia=True))[0]
    assert doctor.advice("metal", {}, None, facts(**MAC)) == []
