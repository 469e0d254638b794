"""doctor: what is used, how fast it is, and what to do about it."""

import json

import pytest

from mlxdet.backends.blas import OWN
from mlxdet.backends.devices import Facts
from mlxdet.backends.doctor import advice, diagnose

FAST = {"name": "scipy-openblas32", "why": "wheel"}
SLOW = {"name": OWN, "why": "wheel scipy-openblas32: not installed"}
LINUX = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), "no NVIDIA driver is loaded on this machine")
GPU = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), None)
BLIND = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cuda-13"}), "the NVIDIA driver shows no GPU")
BOTH = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), None, frozenset({"mlx-cuda-13"}))
MAC = Facts("Darwin", "arm64", frozenset({"mlx", "mlx-metal"}), "CUDA needs Linux")


def test_where_nothing_is_wrong_there_is_no_advice():
    assert advice("cpu", FAST, "g++ 12", None, LINUX) == []
    assert advice("metal", {}, "Apple clang", None, MAC) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cpu", SLOW, "g++ 12", None, LINUX), "pip install 'mlxdet[cpu]'"),
        (("cpu", SLOW, "g++ 12", None, LINUX), "wheel scipy-openblas32: not installed"),
        (("cpu", FAST, None, None, LINUX), "Install g++"),
        (("cpu", FAST, "g++ 12", "read-only file system", LINUX), "read-only file system"),
        (("cpu", FAST, "g++ 12", None, GPU), "pip install 'mlxdet[cuda]'"),
        (("cpu", FAST, "g++ 12", None, BLIND), "CUDA backend is installed, but the NVIDIA driver shows no GPU"),
        (
            ("cpu", FAST, "g++ 12", None, BOTH),
            "mlx-cuda-13 and mlx-cpu write the same library; that of mlx-cpu is in place",
        ),
    ],
)
def test_each_thing_that_is_wrong_has_its_line(arguments, said):
    assert any(said in line for line in advice(*arguments))


def test_this_machine_is_described_and_measured():
    found = json.loads(json.dumps(diagnose("cpu")))
    assert found["matmul_size"] == 512
    assert found["matmul_gflops"] > 0.5
    assert {"mlxdet", "decides", "notes", "pins", "optional", "advice"} <= set(found)
    assert found["decides"]["device"] == "cpu"
