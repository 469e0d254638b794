"""Compiled CPU kernels: never a broken one, never another compiler's, never another process's unfinished one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdet.backends import jit

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at ELF files"),
    pytest.mark.skipif(jit.compiler() is None, reason="no g++, so MLX compiles nothing"),
]

KERNEL = (
    "import mlx.core as mx\n"
    "compiled = mx.compile(lambda x, y: mx.exp(x) * y + mx.tanh(x - y))\n"
    "x = mx.arange(1000, dtype=mx.float32) / 100\n"
    "print(compiled(x, 2 * x).sum().item().hex(), flush=True)\n"
)
ACTIVATE = "from mlxdet import backends\nbackends.activate('cpu')\n"
PRIVATE = "from mlxdet.backends import jit\nprint(jit.start(), flush=True)\n"


@pytest.fixture
def place(tmp_path, cache):
    """An empty TMPDIR and a cache with a precompiled header but no kernels: {variable: value}, and the two paths."""
    temporary, kept = tmp_path / "tmp", tmp_path / "cache" / "mlxdet"
    temporary.mkdir()
    kept.mkdir(parents=True)
    (kept / "blas").symlink_to(cache / "mlxdet" / "blas")
    (key,) = (cache / "mlxdet" / "jit").iterdir()
    (kept / "jit" / key.name).mkdir(parents=True)
    for header in key.glob("header-*.gch"):
        os.link(header, kept / "jit" / key.name / header.name)
    env = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache"), "MLXDET_BLAS": "none"}
    return env, temporary, kept / "jit" / key.name


def left(temporary: Path) -> list[Path]:
    return list(temporary.glob("mlxdet-kernels-*/process-*"))


def output(done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_kernel_is_kept_for_the_next_process_and_nothing_is_left_behind(python, place):
    env, temporary, kept = place
    first = output(python(ACTIVATE + KERNEL, **env))
    (kernel,) = kept.glob("lib*.so")
    assert jit.is_whole(kernel)
    assert left(temporary) == []
    without_compiler = "import subprocess, os\n" + ACTIVATE + "os.environ['PATH'] = '/nowhere'\n"
    assert output(python(without_compiler + KERNEL, **env)) == first  # as it was kept, g++ is not needed again


def test_a_cache_cleared_while_in_use_is_no_trouble(begin, python, place):
    env, _, kept = place
    first = output(python(ACTIVATE + KERNEL, **env))
    process = begin(ACTIVATE + "print('ready', flush=True)\nimport time\ntime.sleep(1)\n" + KERNEL, **env)
    assert process.stdout.readline() == "ready\n"
    (kernel,) = kept.glob("lib*.so")
    kernel.unlink()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.strip() == first


def test_a_truncated_kernel_is_compiled_again(python, place):
    env, _, kept = place
    first = output(python(ACTIVATE + KERNEL, **env))
    (kernel,) = kept.glob("lib*.so")
    good = kernel.read_bytes()
    for size in (0, 1000, 8192, len(good) - 1):
        kernel.write_bytes(good[:size])
        assert output(python(ACTIVATE + KERNEL, **env)) == first
        assert jit.is_whole(kernel)
        assert kernel.stat().st_size == len(good)


def test_mlx_alone_dies_of_a_truncated_kernel(python, tmp_path):
    """What a directory of its own is for."""
    env = {"TMPDIR": str(tmp_path)}
    output(python(KERNEL, **env))
    (kernel,) = tmp_path.glob("mlx/*/cpu/*.so")
    kernel.write_bytes(kernel.read_bytes()[:8192])
    alone = python(KERNEL, **env)
    if alone.returncode == 0:
        pytest.skip("this MLX looks before it loads")
    assert alone.returncode == -signal.SIGBUS


def test_processes_that_start_at_once_in_an_empty_cache_agree(begin, place):
    env, temporary, kept = place
    together = [begin(ACTIVATE + KERNEL, **env) for _ in range(5)]
    said = [process.communicate() for process in together]
    assert len({out for out, _ in said}) == 1, said
    assert all(process.returncode == 0 for process in together)
    assert len(list(kept.glob("lib*.so"))) == 1
    assert left(temporary) == []


def test_the_kernels_of_a_killed_process_are_taken_over_by_the_next(python, place):
    env, temporary, kept = place
    killed = python(ACTIVATE + KERNEL + "import os; os.kill(os.getpid(), 9)", **env)
    assert killed.returncode == -signal.SIGKILL
    assert len(left(temporary)) == 1
    assert not list(kept.glob("lib*.so"))
    output(python(PRIVATE, **env))
    assert len(list(kept.glob("lib*.so"))) == 1
    assert left(temporary) == []


def test_a_truncated_kernel_of_a_killed_process_is_not(python, place):
    env, temporary, kept = place
    python(ACTIVATE + KERNEL + "import os; os.kill(os.getpid(), 9)", **env)
    (kernel,) = temporary.glob("mlxdet-kernels-*/process-*/mlx/*/cpu/lib*.so")
    kernel.write_bytes(kernel.read_bytes()[:8192])
    output(python(PRIVATE, **env))
    assert not list(kept.glob("lib*.so"))


def test_the_directory_of_a_living_process_is_left_alone(begin, python, place):
    env, temporary, _ = place
    process = begin(PRIVATE + "import time; time.sleep(60)", **env)
    mine = Path(process.stdout.readline().strip())
    output(python(PRIVATE, **env))
    assert left(temporary) == [mine]
    process.kill()
    process.communicate()
    output(python(PRIVATE, **env))
    assert left(temporary) == []


def test_a_forked_child_that_ends_takes_nothing_with_it(python, place):
    env, *_ = place
    code = (
        "import os, sys\nfrom mlxdet.backends import jit\nmine = jit.start()\n"
        "if os.fork() == 0:\n    sys.exit(0)\nos.wait()\nprint(mine.is_dir())"
    )
    assert output(python(code, **env)) == "True"


def test_pythons_temporary_files_stay_where_they_were(python, place):
    env, temporary, _ = place
    code = PRIVATE + "import os, tempfile; print(os.environ['TMPDIR'], tempfile.gettempdir(), tempfile.mkdtemp())"
    said = output(python(code, **env)).split()
    assert said[1] == said[2] == str(temporary)
    assert Path(said[3]).parent == temporary


@pytest.mark.parametrize("inherit", ["None", "dict(os.environ)"])
def test_a_child_has_a_directory_of_its_own_beside_its_parents(python, place, inherit):
    env, temporary, _ = place
    again = "import os, tempfile; from mlxdet.backends import jit; print(jit.start(), tempfile.gettempdir())"
    code = f"{PRIVATE}import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {again!r}], env={inherit})"
    parent, child, childs_temporary = output(python(code, **env)).split()
    assert parent != child
    assert Path(parent).parent == Path(child).parent
    assert childs_temporary == str(temporary)


def test_without_tmpdir_a_child_has_none_either(python, place):
    env, *_ = place
    again = "import os; from mlxdet.backends import jit; jit.start(); print(os.environ.get('TMPDIR'))"
    code = f"{PRIVATE}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {again!r}])"
    assert output(python(code, **env | {"TMPDIR": None})).split()[1] == "None"


@pytest.fixture
def other_compiler(tmp_path):
    """A g++ with another version text, in front of the real one: the value of PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    tool = directory / "g++"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 99 Free Software Foundation" || exec /usr/bin/g++ "$@"\n'
    )
    tool.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_kernels_of_another_compiler_are_not_used(python, place, other_compiler):
    env, _, kept = place
    where = "from mlxdet.backends import jit; print(jit.shared_directory())"
    assert output(python(where, **env)) == str(kept)
    assert output(python(where, **env, PATH=other_compiler)) != str(kept)


def test_without_a_compiler_there_is_nothing_to_keep(python, place):
    env, temporary, _ = place
    code = ACTIVATE + PRIVATE + "print(jit.compiler())\n" + KERNEL
    said = output(python(code, **env, PATH="/nowhere")).split()
    assert said[:2] == ["None", "None"]
    assert list(temporary.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_problem_told_not_a_crash(python, place, tmp_path):
    env, *_ = place
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    code = ACTIVATE + "from mlxdet.backends import jit\nprint(jit.problem())\n" + KERNEL
    said = output(python(code, **env | {"XDG_CACHE_HOME": str(blocked)}))
    assert said.startswith("the cache cannot be used: ")
    assert said.splitlines()[1].startswith("0x")


def test_someone_elses_directory_is_not_used(python, place):
    env, temporary, _ = place
    theirs = temporary / "theirs"
    theirs.mkdir()
    (temporary / f"mlxdet-kernels-{os.getuid()}").symlink_to(theirs)
    said = output(python(PRIVATE + "print(jit.problem())", **env))
    assert "belongs to someone else" in said
    assert list(theirs.iterdir()) == []


def machine_code(library: Path) -> bytes:
    """Return the code section: the rest names the source file, whose name is random."""
    target = library.with_suffix(".text")
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.text", str(library), str(target)], check=True)
    code = target.read_bytes()
    target.unlink()
    assert len(code) > 100
    return code


def test_the_precompiled_header_does_not_change_the_code(python, place):
    env, _, kept = place
    (header,) = kept.glob("header-*.gch")
    assert header.stat().st_size > 0, "g++ could not use the precompiled header"
    output(python(ACTIVATE + KERNEL, **env))
    (kernel,) = kept.glob("lib*.so")
    code = machine_code(kernel)
    kernel.unlink()
    header.unlink()
    (kept / "header-0.gch").touch()  # what is kept where g++ cannot use one
    output(python(ACTIVATE + KERNEL, **env))
    assert machine_code(kernel) == code


def test_a_truncated_header_is_made_again(python, place):
    env, _, kept = place
    (header,) = kept.glob("header-*.gch")
    size = header.stat().st_size
    header.unlink()
    header.write_bytes(b"cut")
    (kept / ".making-left").mkdir()  # by a process that was killed
    first = output(python(ACTIVATE + KERNEL, **env))
    assert first.startswith("0x")
    (header,) = kept.glob("header-*.gch")
    assert header.stat().st_size == pytest.approx(size, rel=0.01)
    assert not (kept / ".making-left").exists()


def test_no_more_than_so_many_kernels_are_kept(python, place):
    env, _, kept = place
    output(python(ACTIVATE + KERNEL, **env))
    (kernel,) = kept.glob("lib*.so")
    for i in range(4):
        copy = kept / f"libold{i}.so"
        copy.write_bytes(kernel.read_bytes())
        os.utime(copy, (i, i))
    output(python("from mlxdet.backends import jit\njit.KEPT = 2\njit.start()", **env))
    assert sorted(p.name for p in kept.glob("lib*.so")) == sorted([kernel.name, "libold3.so"])


def test_the_start_is_quick(python, place):
    env, _, kept = place
    output(python(ACTIVATE + KERNEL, **env))
    (kernel,) = kept.glob("lib*.so")
    for i in range(200):
        os.link(kernel, kept / f"libcopy{i}.so")
    code = (
        "import time\nfrom mlxdet.backends import jit\n"
        "began = time.perf_counter()\njit.start()\nprint(time.perf_counter() - began)"
    )
    assert min(float(output(python(code, **env))) for _ in range(3)) < 0.5  # 0.03 s on an idle machine


@pytest.mark.parametrize(
    ("cut", "whole"), [(None, True), (-1, False), (64, False), (63, False), (0, False)], ids=lambda x: str(x)
)
def test_a_whole_library_is_told_from_a_cut_one(compile_library, tmp_path, cut, whole):
    good = compile_library("libone.so", "int one(void) { return 1; }").read_bytes()
    path = tmp_path / "lib.so"
    path.write_bytes(good[:cut])
    assert jit.is_whole(path) is whole
    assert jit.is_whole(tmp_path / "none") is False


def test_the_compiler_is_the_one_mlx_runs():
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout
    assert jit.compiler() == said.splitlines()[0]
