"""Pins: checked, then set; a user's value is never changed; one that comes too late is an error."""

import os

import pytest

from mlxdet.backends import cpu, cuda, metal, pins
from mlxdet.errors import UsageError

TABLES = {"metal": metal.pins, "cuda": cuda.pins, "cpu": cpu.pins}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without a setting of MLX, in a process that has set none."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_", "MLXDET_"))}
    monkeypatch.setattr(os, "environ", clean)
    monkeypatch.setattr(pins, "_set_here", {})
    return clean


def new_process(monkeypatch):
    monkeypatch.setattr(pins, "_set_here", {})


def test_they_are_set_where_they_are_missing(environment):
    in_force = pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    assert in_force == {"MLX_CUDA_USE_CUDNN_SDPA": "0", "MLX_ENABLE_TF32": "0"}
    assert environment["MLX_CUDA_USE_CUDNN_SDPA"] == environment["MLX_ENABLE_TF32"] == "0"


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("kernels", ["deterministic", "default"])
def test_every_entry_has_a_reason(device, kernels):
    assert all(len(reason) > 20 for _, reason in TABLES[device](kernels).values())


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_every_entry_refuses_another_value_by_name_and_sets_nothing(device, environment):
    table = TABLES[device]("deterministic")
    for variable, (_, reason) in table.items():
        before = environment | {variable: "7"}
        environment[variable] = "7"
        with pytest.raises(UsageError) as error:
            pins.apply(table, "deterministic", too_late=False)
        assert f"{variable}=7" in str(error.value)
        assert reason in str(error.value)
        assert "Unset it, or keep it with --kernels default" in str(error.value)
        assert environment == before
        del environment[variable]


def test_the_right_value_is_accepted_even_if_mlx_is_imported(environment):
    environment |= {"MLX_CUDA_USE_CUDNN_SDPA": "0", "MLX_ENABLE_TF32": "0"}
    assert pins.apply(cuda.pins("deterministic"), "deterministic", too_late=True)["MLX_ENABLE_TF32"] == "0"


def test_too_late_is_an_error_and_sets_nothing(environment):
    environment["MLX_ENABLE_TF32"] = "0"
    with pytest.raises(UsageError, match="MLX_CUDA_USE_CUDNN_SDPA=0 comes too late, as MLX is already imported"):
        pins.apply(cuda.pins("deterministic"), "deterministic", too_late=True)
    assert "MLX_CUDA_USE_CUDNN_SDPA" not in environment


def test_default_kernels_keep_the_users_value(environment):
    environment |= {"MLX_ENABLE_TF32": "1", "MLX_SDPA_BLOCKS": "4"}
    in_force = pins.apply(metal.pins("default"), "default", too_late=False)
    assert (in_force["MLX_ENABLE_TF32"], in_force["MLX_SDPA_BLOCKS"]) == ("1", "4")


def test_twice_is_once(environment):
    first = pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    assert pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False) == first


def test_one_process_cannot_have_both_kinds_of_kernels_where_mlx_reads_the_setting_once():
    pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    with pytest.raises(UsageError, match="run --kernels default in a process of its own"):
        pins.apply(cuda.pins("default"), "default", too_late=False)
    assert pins.apply(cpu.pins("default"), "default", too_late=False) == {}  # the CPU does not care


def test_a_child_with_default_kernels_is_not_held_to_its_parents_pins(environment, monkeypatch):
    pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    new_process(monkeypatch)
    pins.apply(cuda.pins("default"), "default", too_late=False)
    assert "MLX_CUDA_USE_CUDNN_SDPA" not in environment
    assert environment["MLX_ENABLE_TF32"] == "0"


def test_what_the_user_set_is_not_taken_for_a_parents_pin(environment, monkeypatch):
    environment["MLX_CUDA_USE_CUDNN_SDPA"] = "0"
    pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    new_process(monkeypatch)
    pins.apply(cuda.pins("default"), "default", too_late=False)
    assert environment["MLX_CUDA_USE_CUDNN_SDPA"] == "0"


def test_a_parents_pin_that_mlx_has_read_is_an_error(monkeypatch):
    pins.apply(cuda.pins("deterministic"), "deterministic", too_late=False)
    new_process(monkeypatch)
    with pytest.raises(UsageError, match="MLX_CUDA_USE_CUDNN_SDPA=0 was set for other kernels"):
        pins.apply(cuda.pins("default"), "default", too_late=True)
