"""Which device to use: decided from what is installed and what the machine has, without importing MLX.

MLX comes in two parts: `mlx` and, on Linux, one wheel with the library for a backend. Without that second wheel
`import mlx.core` dies on a missing libmlx.so, which tells nobody what to install; so it is looked up here first.
"""

import ctypes
import mmap
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from mlxdet.errors import UsageError

DEVICES = ("metal", "cuda", "cpu")  # the order in which "auto" prefers them
CUDA_WHEELS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
WHEELS = ("mlx", "mlx-metal", *CUDA_WHEELS, "mlx-cpu")


@dataclass(frozen=True)
class Facts:
    """What select() decides from. Tests make their own."""

    system: str  # "Darwin", "Linux"
    machine: str  # "arm64", "x86_64"
    wheels: frozenset[str]  # those of WHEELS whose files are in place; a build from source counts as what it holds
    no_gpu: str | None = None  # why CUDA has no GPU to run on; None if it has one
    overwritten: frozenset[str] = frozenset()  # wheels whose library another one has overwritten

    @staticmethod
    def here() -> "Facts":
        """Return the facts of this machine."""
        system = platform.system()
        wheels, overwritten = installed_wheels()
        no_gpu = _why_no_gpu(bool(wheels.intersection(CUDA_WHEELS))) if system == "Linux" else "CUDA needs Linux"
        return Facts(system, platform.machine(), wheels, no_gpu, overwritten)

    def has(self, device: str) -> bool:
        """Return whether an installed MLX runs on `device`. The wheels for a GPU also run on the CPU."""
        if "mlx" not in self.wheels:
            return False
        if self.system == "Darwin":
            return device == "cpu" or (device == "metal" and self.machine == "arm64")
        cuda = not self.wheels.isdisjoint(CUDA_WHEELS)
        return {"metal": False, "cuda": cuda, "cpu": cuda or "mlx-cpu" in self.wheels}[device]

    def remedy(self, device: str) -> str:
        """Return the command that installs what `device` needs."""
        if self.system == "Darwin":
            return "pip install mlxdet"
        on_gpu = device == "cuda" or (device == "auto" and self.no_gpu is None)
        return f"pip install 'mlxdet[{'cuda' if on_gpu else 'cpu'}]'"


def select(device: str = "auto", facts: Facts | None = None) -> str:
    """Return "metal", "cuda" or "cpu" for `device` ("auto" or one of them), without importing MLX.

    "auto" takes Metal on Apple silicon, CUDA where its wheel is installed and a GPU is there, else the CPU. Raises
    UsageError, naming what to install, if MLX has no such backend here.
    """
    if device != "auto" and device not in DEVICES:
        raise UsageError(f"--device {device}: not a device; it is auto, {', '.join(DEVICES)}")
    facts = facts or Facts.here()
    if device == "metal" and (facts.system, facts.machine) != ("Darwin", "arm64"):
        raise UsageError(f"--device metal: this is {facts.system} on {facts.machine}; Metal is on Apple silicon only")
    if device == "cuda" and facts.system != "Linux":
        raise UsageError(f"--device cuda: this is {facts.system}; MLX runs on CUDA under Linux only")
    if "mlx" not in facts.wheels:
        raise UsageError(f"MLX is not installed; {facts.remedy(device)}")
    if device == "auto":
        found = [d for d in DEVICES if facts.has(d) and (d != "cuda" or facts.no_gpu is None)]
        if not found:
            raise UsageError(f"MLX has no backend installed; {facts.remedy(device)}")
        return found[0]
    if not facts.has(device):
        raise UsageError(f"--device {device}: MLX has no {device} backend installed; {facts.remedy(device)}")
    if device == "cuda" and facts.no_gpu is not None:
        raise UsageError(f"--device cuda: {facts.no_gpu}; use --device cpu")
    return device


def package_directory() -> Path | None:
    """Return the directory of the package mlx, found without importing it; None if there is none."""
    spec = find_spec("mlx")
    places: Iterable[str] = (spec.submodule_search_locations or ()) if spec is not None else ()
    for place in places:
        if next(Path(place).glob("core.*"), None) is not None:
            return Path(place)
    return None


def installed_wheels() -> tuple[frozenset[str], frozenset[str]]:
    """Return (those of WHEELS that are installed and in place, those whose library another has overwritten).

    The wheels for CPU and CUDA put different libraries under one name, so of two only the last one installed is there:
    the one whose record of installed files has the size of the file.
    """
    found = {name: record for name in WHEELS if (record := _record(name)) is not None}
    place = package_directory()
    if place is None:
        return frozenset(found), frozenset()
    library = place / "lib" / "libmlx.so"
    backends = {name: record for name, record in found.items() if name not in ("mlx", "mlx-metal")}
    if not backends and library.exists():
        return frozenset({"mlx", _kind_of_build(library)}), frozenset()
    if len(backends) < 2 or not library.exists():
        return frozenset(found), frozenset()
    size = str(library.stat().st_size)
    sizes = {name: _recorded_size(record, "mlx/lib/libmlx.so") for name, record in backends.items()}
    gone = frozenset(name for name, recorded in sizes.items() if recorded != size)
    return (frozenset(found) - gone, gone) if len(gone) < len(backends) else (frozenset(found), frozenset())


def _record(name: str) -> str | None:
    try:
        return distribution(name).read_text("RECORD") or ""
    except PackageNotFoundError:
        return None


def _recorded_size(record: str, path: str) -> str | None:
    rows = (line.rsplit(",", 2) for line in record.splitlines() if line.startswith(path + ","))
    return next((row[2] for row in rows), None)


def _kind_of_build(library: Path) -> str:
    """Return the wheel that a library built from source stands for: it names libcuda if it uses it."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return "mlx-cuda" if content.find(b"libcuda.so") >= 0 else "mlx-cpu"


def _why_no_gpu(ask_the_driver: bool) -> str | None:
    """Return why no NVIDIA GPU can be used, None if one can. Asking the driver takes about 0.1 s where there is one."""
    none_loaded = "no NVIDIA driver is loaded on this machine"
    if not ask_the_driver:
        return None if Path("/proc/driver/nvidia/version").exists() else none_loaded
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return none_loaded
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        return f"the NVIDIA driver finds no GPU ({(text.value or b'error').decode()}, code {code})"
    return None if count.value else "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"
