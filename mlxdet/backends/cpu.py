"""The CPU: nothing to pin, but a cache of compiled kernels to keep whole.

MLX compiles fused kernels with the host's g++ into `$TMPDIR/mlx/<version>/cpu/lib<kernel>.so` and loads whatever lies
there under that name. Three things can go wrong: two processes starting at once load each other's half-written file;
a compiler killed or a disk filled leaves a broken file that every later start trips over; and kernels of an older
compiler, with other bits, are used without a word. So each process compiles in a directory of its own, which starts
with links to the whole kernels of earlier processes, kept apart by compiler and MLX version, and gives its new ones
back when it ends.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mlxdet.backends.files import cache_directory, publish


def pins(kernels: str) -> dict[str, tuple[str | None, str]]:
    """Return {variable: (value, reason)}: none."""
    return {}


@cache
def compiler() -> str | None:
    """Return the first line of `g++ --version`, None if there is no g++ (MLX then fuses nothing)."""
    try:
        done = subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


_private: Path | None = None


def private_jit_cache() -> Path | None:
    """Make this process compile in a directory of its own, once; return it (None without a compiler).

    Sets TMPDIR for the life of the process, as MLX reads it at each compilation; Python's own temporary files stay
    where they were.
    """
    global _private
    if _private is not None or compiler() is None:
        return _private
    top = tempfile.gettempdir()  # also fixes the answer, before TMPDIR changes
    parents = Path(top) / f"mlxdet-jit-{os.getuid()}"
    try:
        parents.mkdir(mode=0o700, exist_ok=True)
        if parents.stat().st_uid != os.getuid() or parents.is_symlink():
            return None
        _sweep(parents)
        private = Path(tempfile.mkdtemp(prefix="process-", dir=parents))
        # The lock lives as long as the process, however it ends; _sweep of a later process sees by it who is gone.
        fcntl.flock(os.open(private / ".lock", os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
        kernels = private / "mlx" / version("mlx") / "cpu"
        kernels.mkdir(parents=True)
    except OSError:
        return None  # a read-only or full temporary directory: MLX itself will say so when it compiles
    shared = _shared()
    if shared.is_dir():
        for path in shared.iterdir():
            if path.suffix == ".so":
                _link(path, kernels / path.name)
    os.environ["TMPDIR"] = str(private)
    atexit.register(_give_back, kernels, private, os.getpid())
    _private = private
    return private


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # another file system
        with contextlib.suppress(OSError):
            shutil.copyfile(path, name)


def _shared() -> Path:
    """The whole kernels of earlier processes with the same MLX, compiler and kind of processor."""
    key = "\n".join([version("mlx"), compiler() or "", platform.machine(), sys.platform])
    return cache_directory("jit") / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _give_back(kernels: Path, private: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked child ends: the directory is its parent's
        return
    with contextlib.suppress(OSError):
        shared = _shared()
        shared.mkdir(parents=True, exist_ok=True)
        for path in kernels.glob("*.so"):
            if not path.is_symlink() and not (shared / path.name).exists():
                publish(path, shared / path.name)
    shutil.rmtree(private, ignore_errors=True)


def _sweep(parents: Path) -> None:
    """Remove the directories of processes that ended without doing so themselves."""
    for path in parents.glob("process-*"):
        with contextlib.suppress(OSError):
            handle = os.open(path / ".lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
