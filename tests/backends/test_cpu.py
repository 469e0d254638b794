"""Linux CPU: the BLAS that is loaded before MLX, and the cache of kernels that is always whole."""

import json
import os
import subprocess
import sys

import pytest

from mlxdet.backends import cpu
from mlxdet.backends.files import publish

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a BLAS is chosen and a kernel cache kept on Linux only"
)

REPORT = """
import json, sys, time
from mlxdet import backends
b = backends.activate("cpu")
import mlx.core as mx, numpy as np
a = mx.array(np.random.default_rng(0).standard_normal((65, 257)).astype(np.float32))
f = mx.compile(lambda x: mx.tanh(x) * x + 1.25)
print(json.dumps({"blas": dict(b.blas), "product": np.array(a @ a.T).tobytes().hex(), "fused": np.array(f(a)).tobytes().hex()}))
"""


def start(tmp_path, code=REPORT, **env):
    base = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "MLXDET_BLAS")}
    base |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")} | env
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", code], env=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child):
    out, err = child.communicate(timeout=180)
    assert child.returncode == 0, err
    return json.loads(out)


def kernels(tmp_path):
    return list((tmp_path / "cache" / "mlxdet" / "jit").rglob("*.so"))


def test_another_blas_gives_other_bits_and_the_choice_is_described(tmp_path):
    fast, own = finish(start(tmp_path)), finish(start(tmp_path, MLXDET_BLAS="none"))
    assert own["blas"] == {"name": "MLX's own", "why": "MLXDET_BLAS=none"}
    assert fast["blas"]["threads"] >= 1 and len(fast["blas"]["digest"]) == 32 and "OpenBLAS" in fast["blas"]["config"]
    assert fast["product"] != own["product"]  # so it is really used
    assert fast["fused"] == own["fused"]


@pytest.mark.parametrize(
    "path, said",
    [("/none/libx.so", "cannot open shared object"), (sys.executable, "cannot"), ("libm.so.6", "no cblas_sgemm")],
)
def test_a_named_blas_that_cannot_be_used_is_an_error(tmp_path, path, said):
    child = start(tmp_path, MLXDET_BLAS=path)
    _, err = child.communicate()
    assert child.returncode == 1 and f"MLXDET_BLAS={path}" in err and said in err


def wheel_copy(tmp_path):
    """Make the renamed copy of the wheel; skip where a system library is taken instead."""
    if finish(start(tmp_path))["blas"]["name"] != "scipy-openblas32":
        pytest.skip("the system has an OpenBLAS of its own")
    (path,) = (tmp_path / "cache" / "mlxdet" / "blas").glob("*.so")
    return path


def test_a_broken_copy_of_the_wheel_is_made_again(tmp_path):
    path = wheel_copy(tmp_path)
    whole = path.read_bytes()
    for content in (whole[:100], whole[:-1], b"", whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]):
        path.unlink()
        path.write_bytes(content)
        assert finish(start(tmp_path))["blas"]["name"] == "scipy-openblas32"
        assert path.read_bytes() == whole
    path.with_suffix(".digest").write_text("")
    assert finish(start(tmp_path))["blas"]["name"] == "scipy-openblas32" and path.read_bytes() == whole


def test_several_processes_start_at_once_with_nothing_cached(tmp_path):
    results = [finish(child) for child in [start(tmp_path) for _ in range(4)]]
    assert all(r == results[0] for r in results)
    assert kernels(tmp_path) and list((tmp_path / "tmp").glob("mlxdet-jit-*/process-*")) == []


def test_kernels_are_used_again_and_a_cleared_cache_is_no_trouble(tmp_path):
    first = finish(start(tmp_path))
    stamps = {p: p.stat().st_mtime_ns for p in kernels(tmp_path)}
    assert finish(start(tmp_path)) == first
    assert {p: p.stat().st_mtime_ns for p in kernels(tmp_path)} == stamps and stamps
    for p in kernels(tmp_path):
        p.unlink()
    assert finish(start(tmp_path)) == first and len(kernels(tmp_path)) == len(stamps)


def test_a_killed_process_leaves_nothing_broken_and_is_swept(tmp_path):
    code = REPORT.replace("print(", "import os; os.kill(os.getpid(), 9); print(")
    child = start(tmp_path, code)
    child.communicate()
    assert child.returncode == -9 and kernels(tmp_path) == []
    left = list((tmp_path / "tmp").glob("mlxdet-jit-*/process-*"))
    assert len(left) == 1
    finish(start(tmp_path))
    assert not left[0].exists() and kernels(tmp_path)


def test_temporary_files_of_python_and_of_a_forked_child_stay_where_they_were(tmp_path):
    code = """
import os, tempfile, json
from mlxdet import backends
backends.activate("cpu")
private = os.environ["TMPDIR"]
pid = os.fork()
if pid == 0:
    import sys
    sys.exit(0)
os.waitpid(pid, 0)
print(json.dumps([tempfile.gettempdir(), private, os.path.isdir(private)]))
"""
    where, private, alive = finish(start(tmp_path, code))
    assert where == str(tmp_path / "tmp") and private.startswith(where + "/mlxdet-jit-") and alive
    assert not os.path.exists(private)


def test_a_home_that_cannot_be_written_is_no_trouble(tmp_path):
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert finish(start(tmp_path, MLXDET_BLAS="none"))["fused"]


def test_without_a_compiler_nothing_is_fused_and_it_is_recorded(tmp_path):
    code = """
import json
from mlxdet import backends
b = backends.activate("cpu")
print(json.dumps(b.fingerprint()["decides"]["compiler"]))
"""
    assert finish(start(tmp_path, code, PATH="/none")) is None
    assert finish(start(tmp_path, code)) == cpu.compiler() and cpu.compiler()


def test_a_published_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            publish(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    publish(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"new"
