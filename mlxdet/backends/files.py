"""Files that processes share: where they lie, and how one appears whole or not at all."""

import os
import shutil
import sys
import tempfile
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return the user's cache directory for `name` (XDG_CACHE_HOME, or the platform's own); it may not exist yet.

    Raises OSError if the user has no home directory, as in some containers.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        top = Path(base)
    else:
        try:
            home = Path.home()
        except RuntimeError:
            raise OSError("there is no home directory; set XDG_CACHE_HOME") from None
        top = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return top / "mlxdet" / name


def publish(source: Path, target: Path) -> None:
    """Copy `source` to `target` so that nobody ever sees a part of it: written beside it, synced, renamed."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=target.parent)
    try:
        with open(handle, "wb") as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o755)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
