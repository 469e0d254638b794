"""The kernels that MLX compiles on the CPU: kept whole, kept apart by compiler, and compiled four times faster.

`mx.compile` writes C++ for each fused kernel, runs the host's g++ on it and loads
`$TMPDIR/mlx/<version>/cpu/lib<kernel>.so`, or whatever lies there under that name from an earlier process. Measured:

* A file cut short (by a crash, a full disk, MLX before 0.32.4 racing with itself) ends every later process with SIGBUS.
* The name does not tell the compiler, so another compiler's kernels, with other bits, are used without a word.
* In a shared /tmp anyone can put a library there.
* One kernel takes g++ 0.9 s, nearly all of it for the same header. A small GPT has 30 to 60 kernels.

So each process compiles in a directory of its own under TMPDIR. It starts with links to the kernels of earlier
processes, which lie in the user's cache apart by MLX, compiler and processor, and gives its new ones back when it ends;
those of a process that was killed are taken over by the next one. g++ gets the header precompiled: 0.2 s a kernel, and
the same machine code, byte for byte.
"""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mlxdet.backends.devices import package_directory
from mlxdet.backends.files import cache_directory, publish

KEPT = 300  # kernels in the user's cache, 15 kB each; linking them all takes 0.05 s
MARK = "MLXDET_TMPDIR"  # tells processes started by this one what TMPDIR was
VECTOR_UNITS = (
    *("avx", "avx2", "fma", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile"),  # x86-64
    *("asimd", "sve", "sve2"),  # aarch64
)
_PARENTS = "mlxdet-kernels-"
_HEADER = "mlx/backend/cpu/compiled_preamble.h"
_FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")  # MLX's; with others g++ ignores the precompiled header

_private: Path | None = None
_problem: str | None = None


@cache
def _version_text() -> str:
    try:
        return subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def compiler() -> str | None:
    """Return the first line of `g++ --version`; None if there is no g++ (MLX then fuses nothing)."""
    return next(iter(_version_text().splitlines()), None)


def problem() -> str | None:
    """Return why kernels cannot be kept from one process to the next, None if they can."""
    return _problem


def start() -> Path | None:
    """Make MLX compile in a directory of this process's own and return it; None without a compiler or a place for it.

    MLX reads TMPDIR at each compilation, so it stays changed, but only for C: `os.environ` and Python's temporary files
    keep the old one. Once per process; about 20 ms, and 2.5 s the first time with a new compiler or MLX.
    """
    global _private, _problem
    if _private is not None or compiler() is None:
        return _private
    _leave_the_parents_directory()
    try:
        private = _make_private(Path(tempfile.gettempdir()) / f"{_PARENTS}{os.getuid()}")
        kernels = private / "mlx" / version("mlx") / "cpu"
        kernels.mkdir(parents=True)
    except OSError as error:
        _problem = f"no directory to compile in: {error}"
        return None
    try:
        shared = shared_directory()
        shared.mkdir(parents=True, exist_ok=True)
        _link_kernels(shared, kernels)
        _link_header(shared, kernels)
    except OSError as error:
        _problem = f"the cache cannot be used: {error}"
    os.putenv(MARK, os.environ.get("TMPDIR", ""))
    os.putenv("TMPDIR", str(private))
    atexit.register(_end, private, os.getpid())
    _private = private
    return private


def shared_directory() -> Path:
    """Return where the kernels of this MLX, compiler and processor are kept in the user's cache."""
    files = sorted((package_directory() or Path()).glob("lib/libmlx.*"))
    if tool := shutil.which("g++"):
        files.append(Path(tool))
    made = [str(x) for f in files for x in (f.stat().st_size, f.stat().st_mtime_ns)]
    parts = [version("mlx"), *made, _version_text(), platform.machine(), *processor_features()]
    return cache_directory("jit") / hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def processor_features() -> list[str]:
    """Return the vector units of the processor that code is chosen by, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    have = set(line.split())
                    return [name for name in VECTOR_UNITS if name in have]
    except OSError:
        pass
    return []


def is_whole(path: Path) -> bool:
    """Return whether a library is as long as its own header says: linkers put the table it points to last.

    What is not an ELF file (a Mac's) counts as whole if it is not empty.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(head) == 64 and head[:6] == b"\x7fELF\x02\x01":
        (table,) = struct.unpack_from("<Q", head, 40)
        each, count = struct.unpack_from("<HH", head, 58)
        return table > 0 and size >= table + each * count
    return platform.system() != "Linux" and size > 0


def _leave_the_parents_directory() -> None:
    """Undo, for this process, the TMPDIR inherited from a parent that uses this module."""
    inherited = os.environ.get("TMPDIR", "")
    if MARK in os.environ and Path(inherited).parent.name.startswith(_PARENTS):
        before = os.environ.pop(MARK)
        if before:
            os.environ["TMPDIR"] = before
        else:
            del os.environ["TMPDIR"]
        if tempfile.tempdir == inherited:
            tempfile.tempdir = None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make_private(parents: Path) -> Path:
    """Make and lock a directory for this process, and clear away those of processes that are gone."""
    parents.mkdir(mode=0o700, exist_ok=True)
    if parents.is_symlink() or parents.stat().st_uid != os.getuid():
        raise OSError(f"{parents} belongs to someone else")
    with _locked(parents / ".lock"):
        for path in parents.glob("process-*"):
            _clear_if_left(path)
        private = Path(tempfile.mkdtemp(prefix="process-", dir=parents))
        # This lock lives as long as the process and those it forks, however they end.
        fcntl.flock(os.open(private, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)
    return private


def _clear_if_left(path: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _published_whole_by_mlx():
                _keep(path, loaded_here=False)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


@cache
def _published_whole_by_mlx() -> bool:
    """Return whether MLX renames a compiled kernel into place: 0.32.4 does, 0.32.2 does not."""
    numbers = version("mlx").split(".")[:3]
    return all(n.isdigit() for n in numbers) and tuple(int(n) for n in numbers) >= (0, 32, 4)


def _link_kernels(shared: Path, kernels: Path) -> None:
    """Link what is whole. Hard links, or copies on another file system: a cleared cache cannot take them away."""
    for path in shared.glob("lib*.so"):
        if is_whole(path):
            with contextlib.suppress(OSError):
                _link_or_copy(path, kernels / path.name)


def _link_or_copy(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:
        try:
            shutil.copyfile(path, name)
        except OSError:  # a full disk: MLX must not load the part that was copied
            name.unlink(missing_ok=True)
            raise


def _keep(private: Path, loaded_here: bool) -> None:
    """Copy the new kernels in `private` to the user's cache; of this process's own only those it has loaded."""
    with contextlib.suppress(OSError):
        shared = shared_directory()
        shared.mkdir(parents=True, exist_ok=True)
        for path in private.glob("mlx/*/cpu/lib*.so"):
            target = shared / path.name
            if not is_whole(target) and is_whole(path) and (not loaded_here or _is_loaded(path)):
                publish(path, target)
        kept = sorted(shared.glob("lib*.so"), key=lambda p: p.stat().st_mtime_ns)
        for path in kept[:-KEPT]:
            path.unlink(missing_ok=True)


def _is_loaded(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _end(private: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked child ends: the directory is its parent's
        return
    before = os.environ.get("TMPDIR")  # for a kernel that another thread compiles even now
    if before is None:
        os.unsetenv("TMPDIR")
    else:
        os.putenv("TMPDIR", before)
    _keep(private, loaded_here=True)
    shutil.rmtree(private, ignore_errors=True)


def _link_header(shared: Path, kernels: Path) -> None:
    """Put the precompiled header where g++ looks first: beside the kernel's source. Made if it is not there."""
    header = (package_directory() or Path()) / "include" / _HEADER
    if "Free Software Foundation" not in _version_text() or not header.exists():
        return  # clang has no such lookup, and an older MLX no such header
    made = _whole_header(shared)
    if made is None:
        with _locked(shared / ".lock"):
            made = _whole_header(shared) or _precompile(header, shared)
    if made.stat().st_size > 0:
        place = (kernels / _HEADER).with_suffix(".h.gch")
        place.parent.mkdir(parents=True)
        place.symlink_to(made)


def _whole_header(shared: Path) -> Path | None:
    """Return the precompiled header in `shared` if it is as long as its name says. Empty: this g++ cannot use one."""
    for path in shared.glob("header-*.gch"):
        if path.name == f"header-{path.stat().st_size}.gch":
            return path
        path.unlink(missing_ok=True)
    return None


def _precompile(header: Path, shared: Path) -> Path:
    """Precompile MLX's header into `shared`, try it, and return the file: an empty one if g++ fails with it."""
    for left in shared.glob(".making-*"):  # by a process that was killed; only one makes at a time
        shutil.rmtree(left, ignore_errors=True)
    include = header.parents[len(Path(_HEADER).parts) - 1]
    with tempfile.TemporaryDirectory(prefix=".making-", dir=shared) as work:
        made, probe = Path(work, _HEADER).with_suffix(".h.gch"), Path(work, "probe.cpp")
        made.parent.mkdir(parents=True)
        probe.write_text(f'#include "{_HEADER}"\nint probe() {{ return 0; }}\n')
        error = _gxx(include, "-x", "c++-header", str(header), "-o", str(made))
        if error:
            raise OSError(f"g++ cannot precompile MLX's header: {error}")
        if _gxx(include, "-Winvalid-pch", "-Werror=invalid-pch", str(probe), "-o", str(probe.with_suffix(".so"))):
            made.write_bytes(b"")
        with made.open("rb") as file:
            os.fsync(file.fileno())
        target = shared / f"header-{made.stat().st_size}.gch"
        os.replace(made, target)
    return target


def _gxx(include: Path, *arguments: str) -> str:
    """Run g++ as MLX does, with more arguments; return the last line of what it says if it fails, else nothing."""
    done = subprocess.run(["g++", *_FLAGS, "-I", str(include), *arguments], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
