"""Verdicts, names and gates of comparing two checkpoints."""

import json
import subprocess
import sys

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

import mlxdet
from mlxdet.errors import UsageError
from mlxdet.formats import Checkpoint, from_numpy, write_safetensors
from mlxdet.measure.compare import compare
from mlxdet.measure.names import module_path
from tests.conftest import mlxdet as run_mlxdet


def model(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    tensors = {
        f"blocks.{i}.{name}.weight": (scale * rng.standard_normal((24, 16))).astype(np.float32)
        for i in range(3)
        for name in ("attention", "mlp")
    }
    return tensors | {"norm.bias": np.zeros(16, np.float32), "ids": np.arange(7), "flag": np.array(True)}


def opened(tensors, **kwargs):
    return Checkpoint("made", "arrays", {k: from_numpy(v) for k, v in sorted(tensors.items())}, **kwargs)


def test_one_ulp_and_small_noise_are_both_named_in_order_and_the_verdict_is_same():
    a, b = model(), model()
    b["blocks.2.mlp.weight"].view(np.int32)[3, 4] += 1
    b["blocks.0.attention.weight"] += (1e-6 * np.random.default_rng(1).standard_normal((24, 16))).astype(np.float32)
    found = compare(a, b)
    assert [t.name for t in found.moved] == ["blocks.0.attention.weight", "blocks.2.mlp.weight"]
    assert found.verdict == "same"
    assert found.moved[1].numbers.max_ulp == 1
    assert found.moved[1].differing == 1
    everything = [
        np.concatenate([np.ravel(t[k]).astype(np.float64) for k in sorted(a) if a[k].dtype == np.float32])
        for t in (a, b)
    ]
    want = np.linalg.norm(everything[0] - everything[1]) / np.linalg.norm(everything[0])
    assert found.total.relfro == pytest.approx(want, rel=1e-12)


def test_identical_with_nan_in_both():
    a = model()
    a["blocks.0.mlp.weight"][0, 0] = np.nan
    found = compare(a, {k: v.copy() for k, v in a.items()})
    assert found.verdict == "identical"
    assert found.total.nan_a == 1
    assert found.moved == []


@pytest.mark.parametrize(
    ("scale", "verdict"),
    [
        (1e-7, "same"),
        (0.99e-5, "same"),
        (1.01e-5, "unclear"),
        (0.099, "unclear"),
        (0.101, "different"),
        (1.0, "different"),
    ],
)
def test_the_verdict_turns_at_the_thresholds(scale, verdict):
    a = {"w": np.array([1.0, 0.0])}
    assert compare(a, {"w": np.array([1.0, scale])}).verdict == verdict


def test_another_seed_is_different():
    found = compare(model(0), model(1))
    assert found.verdict == "different"
    assert 1.3 < found.total.relfro < 1.5
    assert abs(found.total.cosine) < 0.1


def test_sign_of_zero_and_nan_payload_are_not_identical():
    a = {"w": np.array([1.0, 0.0], np.float32), "n": np.array([np.nan, 1.0], np.float32)}
    b = {k: v.copy() for k, v in a.items()}
    b["w"][1] = -0.0
    assert compare(a, b).verdict == "same"
    assert compare(a, b).total.signed_zeros == 1
    b["w"][1] = 0.0
    b["n"].view(np.uint32)[0] ^= 1
    found = compare(a, b)
    assert (found.verdict, found.total.differing, found.total.unmatched) == ("same", 1, 0)


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        ({"w": np.array([np.nan, 1.0])}, "no distance: NaN or infinite on one side only: 1 slot"),
        ({"w": np.array([np.inf, 1.0])}, "no distance: NaN or infinite on one side only: 1 slot"),
        ({"v": np.array([1.0, 1.0])}, "no tensor was compared (1 missing in B, 1 only in B)"),
        ({"w": np.array([[1.0, 1.0]])}, "no tensor was compared (1 of another shape)"),
    ],
)
def test_what_has_no_distance_is_never_a_pass(b, reason):
    found = compare({"w": np.array([1.0, 1.0])}, b)
    assert (found.verdict, found.reason) == ("unclear", reason)


def test_a_zero_reference_has_no_distance():
    found = compare({"w": np.zeros(3)}, {"w": np.array([0, 1e-30, 0])})
    assert (found.verdict, found.reason) == ("unclear", "no distance: the reference is zero")
    assert found.as_dict()["total"]["relFro"] is None


def test_nothing_on_either_side_is_not_identical():
    assert compare({}, {}).verdict == "unclear"


def test_a_tensor_without_counterpart_prevents_same_and_the_rest_is_compared():
    a, b = model(), model()
    del b["ids"]
    b["new"] = np.ones(2)
    b["norm.bias"] = np.zeros((2, 8), np.float32)
    found = compare(a, b)
    assert (found.missing, found.extra) == (["ids"], ["new"])
    assert found.reshaped == [("norm.bias", (16,), (2, 8))]
    assert found.verdict == "unclear"
    assert "1 missing in B, 1 only in B, 1 of another shape" in found.reason
    assert len(found.tensors) == 7


def test_another_dtype_has_its_line_and_is_compared_by_value():
    a, b = model(), model()
    b["norm.bias"] = b["norm.bias"].astype(np.float64)
    found = compare(a, b)
    assert found.retyped == [("norm.bias", "F32", "F64")]
    assert found.verdict == "same"
    a["blocks.0.mlp.weight"] = a["blocks.0.mlp.weight"].astype(np.float16)
    assert compare(a, b).verdict == "unclear"


def test_what_could_not_be_read_prevents_identical():
    a = opened(model())
    assert compare(a, opened(model())).verdict == "identical"
    found = compare(a, opened(model(), unread=("sparse.weight",)))
    assert found.verdict == "unclear"
    assert found.unread == ["B: 'sparse.weight'"]


def test_metadata_and_files_never_decide_and_are_reported():
    found = compare(opened(model(), metadata={"time": 1, "id": 5}), opened(model(), metadata={"time": 2, "id": 5}))
    assert found.verdict == "identical"
    assert found.notes == ["metadata differs in 1 of 2 fields: 'time'"]


def test_a_tied_head_that_one_side_leaves_out_is_no_gap():
    table = np.ones((4, 2), np.float32)
    a = opened({"head": table, "embed": table}, tied=(("head", "embed"),))
    found = compare(a, opened({"embed": table}))
    assert (found.verdict, found.missing) == ("identical", [])
    assert found.tied == ["'embed' = 'head': tied in A only; the other side has 'embed' alone"]
    untied = compare(a, opened({"embed": table, "head": table + 1}))
    assert [t.name for t in untied.moved] == ["head"]
    assert compare(opened({"head": table, "embed": table}), opened({"embed": table})).missing == ["head"]


def test_a_swapped_pair_is_named():
    a, b = model(), model()
    one, two = "blocks.0.mlp.weight", "blocks.1.mlp.weight"
    b[one], b[two] = b[two], b[one]
    assert sorted(t.name for t in compare(a, b).moved) == [one, two]


def test_per_tensor_judges_the_worst_one():
    a = {"large": np.full(10_000, 100.0), "small": np.ones(2)}
    b = {"large": np.full(10_000, 100.0), "small": np.full(2, 1.05)}
    assert compare(a, b).verdict == "same"
    found = compare(a, b, per_tensor=True)
    assert (found.verdict, found.reason) == ("unclear", "relFro of 'small' 0.05 lies between 1e-05 and 0.1")


def test_names_are_mapped():
    a = {f"model.{k}": v for k, v in model().items()}
    b = model()
    b["final.bias"] = b.pop("norm.bias")
    found = compare(a, b, strip=["model."], rename=[("norm", "final")])
    assert found.verdict == "identical"
    assert compare(a, b, strip=["model."], rename=[("norm.bias", "final.bias")]).verdict == "identical"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strip": ["models."]}, "--strip models.: no tensor of either side"),
        ({"rename": [("blocks.9", "x")]}, "--rename blocks.9=x: no tensor of either side"),
        ({"rename": [("ids", "flag")]}, "made: 'flag' and 'ids' would both be called 'flag'"),
        ({"only": "nowhere"}, "--only nowhere: no tensor"),
        ({"only": "("}, "--only '(' is not a regular expression"),
        ({"group": "["}, "--group '[' is not a regular expression"),
        ({"same": 0.2}, "the thresholds must be"),
        ({"same": float("nan")}, "the thresholds must be"),
    ],
)
def test_what_contradicts_itself_is_refused(options, message):
    with pytest.raises(UsageError) as caught:
        compare(opened(model()), opened(model()), **options)
    assert str(caught.value).startswith(message)


def test_groups():
    a, b = model(), model(5)
    assert set(compare(a, b).groups) == {"blocks.0", "blocks.1", "blocks.2", "norm", "ids", "flag"}
    assert set(compare(a, b, group=r"attention|mlp").groups) == {"attention", "mlp", "(other)"}
    by_layer = compare(a, b, group=r"blocks\.(\d+)")
    assert set(by_layer.groups) == {"0", "1", "2", "(other)"}
    stacked = [np.concatenate([t[f"blocks.1.{n}.weight"].ravel() for n in ("attention", "mlp")]) for t in (a, b)]
    want = np.linalg.norm((stacked[0] - stacked[1]).astype(np.float64)) / np.linalg.norm(stacked[0].astype(np.float64))
    assert by_layer.groups["1"].relfro == pytest.approx(want, rel=1e-6)
    assert module_path("model.layers.10.mlp.weight") == "model.layers.10"


def test_a_counter_does_not_hide_what_the_weights_did():
    a, b = (
        {"w": np.array([0.02, 0.01]), "step": np.array(10**6)},
        {"w": np.array([0.01, 0.02]), "step": np.array(10**6)},
    )
    found = compare(a, b)
    assert found.verdict == "different"
    assert found.total.relfro == pytest.approx((2 * 0.01**2) ** 0.5 / (0.02**2 + 0.01**2) ** 0.5, rel=1e-12)
    assert (found.total.slots, found.total.differing) == (3, 2)


def test_integers_that_differ_are_not_the_same():
    a = {"w": np.ones(3), "step": np.array(10**9)}
    found = compare(a, a | {"step": np.array(10**9 + 1)})
    assert (found.verdict, found.reason) == ("unclear", "integers differ: 'step'; relFro 0")
    assert compare({"ids": np.array([10**9, 5])}, {"ids": np.array([10**9, 6])}).verdict == "same"


def test_only():
    a, b = model(), model()
    b["ids"] = b["ids"] + 1
    assert compare(a, b, only="blocks").verdict == "identical"


def test_trees_of_arrays_of_other_libraries():
    a = {"m": [mx.array([1.0, 2.0]).astype(mx.bfloat16), {"w": mx.zeros((2, 2))}], "n": 3}
    b = {"m": [np.array([1.0, 2.0], ml_dtypes.bfloat16), {"w": np.zeros((2, 2), np.float32)}], "n": 3}
    found = mlxdet.compare(a, b)
    assert found.verdict == "identical"
    assert [t.name for t in found.tensors] == ["m.0", "m.1.w", "n"]
    with pytest.raises(UsageError, match=r"tree b: m: str is not an array"):
        mlxdet.compare(a, {"m": "text"})
    with pytest.raises(UsageError, match=r"both called 'm\.0'"):
        mlxdet.compare({"m.0": np.ones(1), "m": [np.ones(1)]}, b)


def test_0d_and_empty_tensors_are_compared_as_any_other():
    a = {"x": np.float64(3.0), "none": np.zeros((0, 4))}
    assert compare(a, a).identical
    found = compare(a, a | {"x": np.float64(3.0) + 3e-6})
    assert found.verdict == "same" and found.total.relfro == pytest.approx(1e-6, rel=1e-9)
    assert [t.shape for t in found.tensors] == [(0, 4), ()]
    found = compare(a, {"x": np.full(1, 3.0), "none": np.zeros((4, 0))})  # as many slots, of other shapes
    assert found.verdict == "unclear" and [n for n, _, _ in found.reshaped] == ["none", "x"]


def test_a_mask_is_not_dropped_unsaid():
    a, b = (np.ma.array([1.0, 2.0], mask=[hidden, 0]) for hidden in (0, 1))
    with pytest.raises(UsageError, match="tree a: w: a masked array"):
        compare({"w": a}, {"w": b})


def test_one_prefix_may_be_given_bare():
    assert compare({"module.a": np.ones(2)}, {"a": np.ones(2)}, strip="module.").identical


def test_a_reference_without_a_finite_value_is_not_called_zero():
    a = np.full(4, np.nan)
    found = compare({"w": a}, {"w": (a.view("u8") + 1).view("f8")})
    assert (found.verdict, found.reason) == ("unclear", "no distance: the reference is zero where it is finite")


def test_assert_identical_names_the_worst_tensor():
    a, b = model(), model()
    mlxdet.assert_identical(a, b)
    b["blocks.1.mlp.weight"].view(np.int32)[0, 0] ^= 1
    b["blocks.0.mlp.weight"] *= np.float32(1.1)
    del b["flag"]
    with pytest.raises(AssertionError) as caught:
        mlxdet.assert_identical(a, b)
    message = str(caught.value)
    assert "missing in b: 'flag'" in message
    assert "2 of 8 tensors moved, worst 'blocks.0.mlp.weight': relFro 0.1, max_abs" in message
    assert "384 of 384 slots" in message


def save(path, tensors):
    with path.open("wb") as file:
        write_safetensors(file, {k: from_numpy(v) for k, v in tensors.items()})
    return str(path)


@pytest.mark.parametrize(
    ("change", "holds"),
    [(0.0, {"identical", "same"}), (1e-7, {"same"}), (1e-3, set()), (1.0, {"different"})],
)
def test_every_gate_can_fail(tmp_path, change, holds):
    rng = np.random.default_rng(3)
    moved = {
        k: v + (change * rng.standard_normal(v.shape)).astype(v.dtype) if v.ndim == 2 else v for k, v in model().items()
    }
    a, b = save(tmp_path / "a.safetensors", model()), save(tmp_path / "b.safetensors", moved)
    for expect in ("identical", "same", "different"):
        done = run_mlxdet("check", a, b, "--expect", expect, "--json")
        assert done.returncode == (0 if expect in holds else 1), expect
        found = json.loads(done.stdout)
        assert found["holds"] == (expect in holds)
    assert run_mlxdet("check", a, b).returncode == 0


def test_the_table_names_what_moved(tmp_path):
    other = model()
    other["blocks.0.mlp.weight"][0, 0] += 1
    other["new\nline"] = np.ones(1)
    other["[bold]x"] = other.pop("ids") + 1
    first = model()
    first["[bold]x"] = first.pop("ids")
    a, b = save(tmp_path / "a.safetensors", first), save(tmp_path / "b.safetensors", other)
    done = run_mlxdet("check", a, b, "--expect", "different", COLUMNS="120")
    assert done.returncode == 1
    assert "blocks.0.mlp.weight F32 24x16 1 (0.26%)" in " ".join(done.stdout.split())
    assert r"only in B: 'new\nline'" in done.stdout
    assert "[bold]x" in done.stdout
    assert "expected different: does not hold" in done.stdout


def test_unreadable_files_and_wrong_flags_exit_2(tmp_path):
    a = save(tmp_path / "a.safetensors", model())
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    for args in ((a, str(cut)), (a, str(tmp_path / "none")), (a, a, "--rename", "x"), (a, a, "--expect", "equal")):
        done = run_mlxdet("check", *args)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) <= 2


@pytest.mark.parametrize("option", ["--same", "--different"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_threshold_is_a_finite_number(tmp_path, option, number):
    a = save(tmp_path / "a.safetensors", model())
    assert run_mlxdet("check", a, a, option, number).returncode == 2


def test_a_narrow_terminal_costs_no_digit(tmp_path):
    a = save(tmp_path / "a.safetensors", {"layers.0.attention.weight": np.ones((100, 100))})
    b = save(tmp_path / "b.safetensors", {"layers.0.attention.weight": np.ones((100, 100)) + 1.234e-7})
    said = run_mlxdet("check", a, b, COLUMNS="40").stdout
    assert "…" not in said and "same: relFro 1.23e-07 <= 1e-05" in said.splitlines()


def test_control_characters_in_the_name_of_a_file_do_not_reach_the_terminal(tmp_path):
    a = save(tmp_path / "a\x1b[31m.safetensors", model())
    done = run_mlxdet("check", a, a), run_mlxdet("check", a, str(tmp_path / "none\x1b[2J"))
    assert [d.returncode for d in done] == [0, 2]
    assert r"a\x1b[31m" in done[0].stdout and r"none\x1b[2J" in done[1].stderr
    assert not any("\x1b" in d.stdout + d.stderr for d in done)


def test_a_full_disk_is_no_defect_and_no_verdict(tmp_path):
    a = save(tmp_path / "a.safetensors", model())
    for flags in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-m", "mlxdet", "check", a, a, *flags], stdout=full,
                                  stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert done.returncode == 2 and "nothing more can be written" in done.stderr
