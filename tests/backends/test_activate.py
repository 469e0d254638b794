"""activate(): MLX comes after the pins, once, whoever asks and however often."""

import json

import mlx.core as mx
import pytest

from mlxdet import backends
from mlxdet.backends import Backend
from mlxdet.errors import UsageError

# A CPU that pins what CUDA pins: the order of events can be seen without a GPU.
PINNED_CPU = "from mlxdet import backends\nfrom mlxdet.backends import cuda\nbackends._TABLES['cpu'] = cuda.pins\n"


def test_importing_backends_does_not_import_mlx(python):
    code = "import sys, mlxdet.backends; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'numpy')])"
    assert python(code).stdout == "[]\n"
    code = "import sys, mlxdet, mlxdet.config, mlxdet.training.run; print('mlx.core' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_pins_are_in_the_environment_before_mlx_is_imported(python):
    code = PINNED_CPU + (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mlx.core':\n"
        "            print('at import', os.environ.get('MLX_ENABLE_TF32'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "print(dict(backends.activate('cpu').pins))"
    )
    assert python(code, MLX_ENABLE_TF32=None).stdout.splitlines() == [
        "at import 0",
        "{'MLX_CUDA_USE_CUDNN_SDPA': '0', 'MLX_ENABLE_TF32': '0'}",
    ]


def test_mlx_imported_before_its_pins_is_an_error(python):
    done = python("import mlx.core\n" + PINNED_CPU + "backends.activate('cpu')", MLX_ENABLE_TF32=None)
    assert done.returncode == 1
    assert "UsageError: MLX_ENABLE_TF32=0 comes too late, as MLX is already imported" in done.stderr


def test_mlx_imported_before_with_the_right_settings_is_fine(python):
    code = "import mlx.core\n" + PINNED_CPU + "backends.activate('cpu'); print('fine')"
    done = python(code, MLX_ENABLE_TF32="0", MLX_CUDA_USE_CUDNN_SDPA="0", MLXDET_BLAS="none")
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_threads_get_one_backend(python, cache):
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom mlxdet import backends\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    found = list(pool.map(lambda _: backends.activate('cpu'), range(8)))\n"
        "print(len(set(map(id, found))), found[0].name)"
    )
    assert python(code, XDG_CACHE_HOME=str(cache)).stdout == "1 cpu\n"


def test_a_child_process_can_activate_again(python, cache):
    code = (
        "import subprocess, sys\nfrom mlxdet import backends\nbackends.activate('cpu')\n"
        "again = 'from mlxdet import backends; print(backends.activate(\"cpu\").name)'\n"
        "print(subprocess.run([sys.executable, '-c', again], capture_output=True, text=True))"
    )
    done = python(code, XDG_CACHE_HOME=str(cache))
    assert "returncode=0, stdout='cpu\\n', stderr=''" in done.stdout


def test_again_is_the_same_and_puts_mlx_back_on_the_device(backend):
    assert backends.activate("cpu") == backend
    assert backends.activate("cpu") is backends.activate("cpu")
    assert mx.default_device() == mx.Device(mx.cpu)


def test_on_the_cpu_one_process_may_have_both_kinds_of_kernels(backend):
    try:
        other = backends.activate("cpu", "default")
        assert (other.kernels, other.blas) == ("default", backend.blas)
    finally:
        assert backends.activate("cpu") == backend


def test_unknown_kernels_are_refused():
    with pytest.raises(UsageError, match="--kernels fast: it is deterministic or default"):
        backends.activate("cpu", "fast")


@pytest.mark.parametrize(
    ("name", "kernels", "norms", "attention"),
    [
        ("cuda", "deterministic", "plain", "plain"),
        ("cuda", "default", "fast", "fast"),
        ("metal", "deterministic", "fast", "fast"),
        ("cpu", "deterministic", "fast", "fast"),
    ],
)
def test_plain_kernels_where_the_fused_ones_race(name, kernels, norms, attention):
    chosen = Backend(name, kernels)
    assert (chosen.norms, chosen.attention) == (norms, attention)


@pytest.mark.parametrize(
    ("name", "vocab", "method"),
    [
        ("cpu", 256, "onehot"),
        ("cpu", 1024, "onehot"),
        ("cpu", 1025, "scatter"),
        ("metal", 256, "onehot"),
        ("metal", 32000, "fixedpoint"),
        ("cuda", 1024, "onehot"),
        ("cuda", 1025, "fixedpoint"),
    ],
)
def test_the_embedding_gradient_never_races(name, vocab, method):
    assert Backend(name, "deterministic").embedding_method(vocab, 4096) == method


def test_a_backend_survives_json(backend):
    found = json.loads(json.dumps(backend.fingerprint()))
    assert found == backend.fingerprint()
