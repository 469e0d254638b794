"""What a run was made by: code, command and environment, and where two environments differ."""

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlxdet


def code_identity() -> dict[str, Any]:
    """Return version, digest of the package's own source files, and (in a git checkout) commit and dirty mark."""
    package = Path(mlxdet.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(len(name).to_bytes(4, "little") + name + len(content).to_bytes(8, "little") + content)
    try:
        number = version("mlxdet")
    except PackageNotFoundError:
        number = "not installed"
    identity: dict[str, Any] = {"version": number, "source": digest.hexdigest()}
    if (package.parent / ".git").exists():
        commit = _git(package.parent, "rev-parse", "HEAD")
        changes = _git(package.parent, "status", "--porcelain")
        if commit is not None and changes is not None:
            identity |= {"commit": commit, "dirty": bool(changes)}
    return identity


def _git(directory: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=directory, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dictionary with dotted names."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in flat(sub, f"{prefix}.{name}" if prefix else name).items()}


def environment_differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, in a, in b) for what may change bits and differs between two fingerprints."""
    x, y = flat(a["decides"]), flat(b["decides"])
    return [(k, x.get(k), y.get(k)) for k in sorted(x.keys() | y.keys()) if x.get(k) != y.get(k)]
