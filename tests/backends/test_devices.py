"""Which device is chosen, from facts of machines that are not this one."""

import sys

import pytest

from mlxdet.backends import devices
from mlxdet.backends.devices import Facts, select
from mlxdet.errors import UsageError

linux = pytest.mark.skipif(sys.platform != "linux", reason="wheels for CPU and CUDA are Linux's")

NO_DRIVER = "no NVIDIA driver is loaded on this machine"
MAC = Facts("Darwin", "arm64", frozenset({"mlx", "mlx-metal"}), "CUDA needs Linux")
INTEL_MAC = Facts("Darwin", "x86_64", frozenset({"mlx", "mlx-metal"}), "CUDA needs Linux")
CPU = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), NO_DRIVER)
GPU_WITH_CPU_WHEEL = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cpu"}), None)
GPU = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cuda-13"}), None)
GPU_12 = Facts("Linux", "aarch64", frozenset({"mlx", "mlx-cuda-12"}), None)
CUDA_WHEEL_WITHOUT_GPU = Facts("Linux", "x86_64", frozenset({"mlx", "mlx-cuda-13"}), NO_DRIVER)
NO_BACKEND = Facts("Linux", "x86_64", frozenset({"mlx"}), NO_DRIVER)
NO_BACKEND_ON_GPU = Facts("Linux", "x86_64", frozenset({"mlx"}), None)
NO_MLX = Facts("Linux", "x86_64", frozenset(), NO_DRIVER)
NO_MLX_ON_MAC = Facts("Darwin", "arm64", frozenset(), "CUDA needs Linux")


@pytest.mark.parametrize(
    ("facts", "device", "chosen"),
    [
        (MAC, "auto", "metal"),
        (MAC, "metal", "metal"),
        (MAC, "cpu", "cpu"),
        (INTEL_MAC, "auto", "cpu"),
        (CPU, "auto", "cpu"),
        (CPU, "cpu", "cpu"),
        (GPU_WITH_CPU_WHEEL, "auto", "cpu"),
        (GPU, "auto", "cuda"),
        (GPU, "cuda", "cuda"),
        (GPU, "cpu", "cpu"),
        (GPU_12, "auto", "cuda"),
        (CUDA_WHEEL_WITHOUT_GPU, "auto", "cpu"),
    ],
)
def test_the_device_that_is_there_is_chosen(facts, device, chosen):
    assert select(device, facts) == chosen


@pytest.mark.parametrize(
    ("facts", "device", "said"),
    [
        (NO_BACKEND, "auto", "MLX has no backend installed; pip install 'mlxdet[cpu]'"),
        (NO_BACKEND, "cpu", "--device cpu: MLX has no cpu backend installed; pip install 'mlxdet[cpu]'"),
        (NO_BACKEND_ON_GPU, "auto", "MLX has no backend installed; pip install 'mlxdet[cuda]'"),
        (GPU_WITH_CPU_WHEEL, "cuda", "--device cuda: MLX has no cuda backend installed; pip install 'mlxdet[cuda]'"),
        (NO_MLX, "auto", "MLX is not installed; pip install 'mlxdet[cpu]'"),
        (NO_MLX_ON_MAC, "auto", "MLX is not installed; pip install mlxdet"),
        (CUDA_WHEEL_WITHOUT_GPU, "cuda", f"--device cuda: {NO_DRIVER}; use --device cpu"),
        (MAC, "cuda", "--device cuda: this is Darwin; MLX runs on CUDA under Linux only"),
        (CPU, "metal", "--device metal: this is Linux on x86_64; Metal is on Apple silicon only"),
        (INTEL_MAC, "metal", "--device metal: this is Darwin on x86_64; Metal is on Apple silicon only"),
        (CPU, "tpu", "--device tpu: not a device; it is auto, metal, cuda, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_line_that_says_what_to_install(facts, device, said):
    with pytest.raises(UsageError) as error:
        select(device, facts)
    assert str(error.value) == said


@pytest.fixture
def site(tmp_path):
    """Make a directory of installed packages with MLX's files: {wheel: size of the libmlx.so it recorded}."""

    def make(wheels: dict[str, int], library: bytes | None) -> str:
        (tmp_path / "mlx" / "lib").mkdir(parents=True)
        (tmp_path / "mlx" / "core.so").touch()
        if library is not None:
            (tmp_path / "mlx" / "lib" / "libmlx.so").write_bytes(library)
        for name, size in wheels.items():
            info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256=x,{size}\n" if size else "mlx/core.so,,\n")
        return str(tmp_path)

    return make


def look(python, site: str, statement: str) -> str:
    """Run `statement` in an interpreter that has the packages of `site` and no others."""
    code = f"import sys; sys.path.append({site!r})\nfrom mlxdet.backends import devices, activate\n{statement}"
    done = python(code, "-S")
    return done.stdout + done.stderr


@linux
def test_mlx_without_a_backend_is_told_before_it_dies_on_a_missing_library(python, site):
    said = look(python, site({"mlx": 0}, None), "activate()")
    assert "UsageError: MLX has no backend installed; pip install 'mlxdet[c" in said
    assert "libmlx" not in said.splitlines()[-1]


@linux
def test_of_two_wheels_only_the_one_whose_library_is_in_place_counts(python, site):
    where = site({"mlx": 0, "mlx-cpu": 10, "mlx-cuda-13": 20}, b"x" * 10)
    print_them = "print(*(sorted(x) for x in devices.installed_wheels()))"
    assert look(python, where, print_them) == "['mlx', 'mlx-cpu'] ['mlx-cuda-13']\n"


@linux
@pytest.mark.parametrize(("library", "kind"), [(b"..libcuda.so.1..", "mlx-cuda"), (b"....", "mlx-cpu")])
def test_a_build_from_source_counts_as_what_it_holds(python, site, library, kind):
    where = site({"mlx": 0}, library)
    assert look(python, where, "print(*(sorted(x) for x in devices.installed_wheels()))") == f"['mlx', '{kind}'] []\n"


DRIVER = """
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuGetErrorString(int code, const char **text) {{ *text = "no CUDA-capable device is detected"; return 0; }}
"""


@linux
@pytest.mark.parametrize(
    ("init", "count", "said"),
    [
        (0, 1, "None"),
        (100, 0, "the NVIDIA driver finds no GPU (no CUDA-capable device is detected, code 100)"),
        (0, 0, "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"),
    ],
)
def test_the_driver_is_asked_for_a_gpu(python, compile_library, init, count, said):
    library = compile_library("libcuda.so.1", DRIVER.format(init=init, count=count))
    code = "from mlxdet.backends import devices; print(devices._why_no_gpu(True))"
    assert python(code, LD_LIBRARY_PATH=str(library.parent)).stdout.strip() == said


def test_this_machine_has_what_its_tests_run_on(backend):
    assert devices.Facts.here().has(backend.name)
