"""A ladder tells rounding from growth, finds the rung that does not fit, and climbs when a race is planted."""

import json
import math
import shlex
import sys

import numpy as np
import pytest

from mlxdet import config as configs
from mlxdet.cli import run as cli
from mlxdet.errors import UsageError
from mlxdet.formats import Checkpoint, read_safetensors
from mlxdet.measure.commands import Part, Written
from mlxdet.measure.growth import fit_growth
from mlxdet.measure.ladder import by_step, ladder, parse_steps

RUNGS = [0, 5, 20, 50, 100]
# A published step ladder (a Burn model on CUDA, two runs per step): "the 20-step row is an open anomaly".
PUBLISHED = [1.200e-08, 1.515e-08, 7.353e-07, 9.851e-09, 1.226e-08]
TINY = shlex.split(
    "--preset nano --layers 1 --width 32 --mlp 64 --context 32 --batch 4 --val-every 0 --device cpu --seed 7"
)


def test_the_published_ladder_is_a_floor_with_its_one_anomaly():
    growth = fit_growth(RUNGS, PUBLISHED)
    assert (growth.kind, growth.anomalies) == ("floor", (20,))
    assert str(growth) == "does not grow: at the rounding floor; breaking the trend: step 20"


@pytest.mark.parametrize("doubling", [2.0, 7.0, 40.0])
def test_a_clean_exponential_gives_its_doubling_time(doubling):
    growth = fit_growth(RUNGS, [1e-9 * 2 ** (s / doubling) for s in RUNGS])
    assert (growth.kind, growth.start, growth.end, growth.plateau, growth.anomalies) == ("growth", 0, 100, None, ())
    assert growth.doubling == pytest.approx(doubling) and growth.residual == pytest.approx(1.0, abs=1e-6)


def test_noise_around_an_exponential_shows_in_the_residual():
    steps = list(range(0, 101, 5))
    off = np.random.default_rng(3).normal(0, 0.1, len(steps))
    growth = fit_growth(steps, [1e-8 * 10 ** (s * math.log10(2) / 5 + e) for s, e in zip(steps, off, strict=True)])
    assert growth.kind == "growth" and growth.doubling == pytest.approx(5.0, rel=0.05)
    assert growth.residual == pytest.approx(10 ** np.sqrt(np.mean(off**2)), rel=0.1)


@pytest.mark.parametrize("bend", [lambda d: min(d, 0.9), lambda d: d / (1 + d / 0.9)], ids=["sharp", "soft"])
def test_growth_that_saturates_is_fitted_before_the_plateau(bend):
    steps = list(range(0, 200, 10))
    growth = fit_growth(steps, [bend(1e-8 * 2 ** (s / 3)) for s in steps])
    assert growth.kind == "growth" and growth.doubling == pytest.approx(3.0, rel=0.03)
    assert growth.plateau == pytest.approx(0.9, rel=0.1) and growth.start == 0 and 70 <= growth.end <= 80
    assert "then levels off at 0." in str(growth)


def test_growth_that_comes_out_of_the_floor_is_fitted_after_it():
    steps = list(range(0, 200, 10))
    growth = fit_growth(steps, [max(1.1e-8, 1e-12 * 2 ** (s / 6)) for s in steps])
    assert growth.kind == "growth" and growth.doubling == pytest.approx(6.0, rel=0.01) and growth.start >= 80


def test_a_flat_floor_of_chance_does_not_grow():
    rng = np.random.default_rng(0)
    kinds = [fit_growth(RUNGS, list(10 ** rng.normal(-8, 0.15, 5))).kind for _ in range(200)]
    assert kinds.count("floor") >= 198


def test_an_anomaly_inside_growth_is_found_and_left_out():
    distances = [1e-8 * 2 ** (s / 10) for s in range(0, 101, 10)]
    distances[4] *= 1e4
    growth = fit_growth(range(0, 101, 10), distances)
    assert growth.anomalies == (40,) and growth.doubling == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("distances", "kind", "anomalies"),
    [
        ([0.0] * 5, "identical", ()),
        ([0.0, 1e-8, 0.0, 1.2e-8, 1.1e-8], "floor", ()),
        ([1e-4, 1.1e-4, 1.2e-4, 1e-4, 1.1e-4], "level", ()),
        ([1e-4, 1e-4, 1e-7, 1.1e-4, 1e-4], "level", (20,)),
        ([1e-2, 1e-8, 1.1e-8, 1e-8, 1e-8], "floor", (0,)),
        ([1e-8, 1.1e-8, 1e-8, 1.2e-8, 1e-5], "irregular", ()),
    ],
    ids=["zeros", "zeros between", "level", "dip", "first", "jump at the end"],
)
def test_what_is_no_growth_is_not_called_growth(distances, kind, anomalies):
    growth = fit_growth(RUNGS, distances)
    assert (growth.kind, growth.anomalies, growth.doubling) == (kind, anomalies, None)


def test_zeros_have_no_logarithm_and_stay_out_of_the_fit():
    growth = fit_growth(RUNGS, [0.0, 0.0, *(1e-8 * 2 ** (s / 8) for s in (20, 50, 100))])
    assert growth.kind == "growth" and growth.start == 20 and growth.doubling == pytest.approx(8.0)


def test_one_rung_or_two_show_no_rate():
    assert fit_growth([5], [1e-4]).kind == fit_growth([5, 10], [1e-8, 1e-4]).kind == "irregular"


def wrote(*names):
    return Written({name: Part(name, Checkpoint(None, "npz", {})) for name in names}, {})


def test_rungs_are_found_by_the_step_in_their_names():
    names = ["checkpoints/00000020 (weights)", "checkpoint-100/model.safetensors", "w5.npz", "epoch=5-step=50.ckpt",
             "last.pt", "checkpoint-7/x.pt"]  # fmt: skip
    found = by_step(wrote(*names), [5, 20, 50, 100])
    assert {step: list(written.parts) for step, written in found.items()} == {
        5: ["w{step}.npz"], 20: ["checkpoints/{step} (weights)"], 50: ["epoch=5-step={step}.ckpt"],
        100: ["checkpoint-{step}/model.safetensors"],
    }  # fmt: skip


def test_a_rung_without_a_checkpoint_or_a_name_for_two_rungs_is_refused():
    with pytest.raises(UsageError, match=r"step 20: no checkpoint .* it holds w5\.npz"):
        by_step(wrote("w5.npz"), [5, 20])
    with pytest.raises(UsageError, match=r"part-5-of-20\.npz: belongs to step 5 or 20\?"):
        by_step(wrote("part-5-of-20.npz"), [5, 20])


def test_steps_are_whole_numbers():
    assert parse_steps("20, 5,0,5") == [0, 5, 20]
    for bad in ("", "5,", "-1", "1e3", "x"):
        with pytest.raises(UsageError, match="--steps"):
            parse_steps(bad)


# The second process to see a step has its weights doubling away every 7 steps; `odd` is 1e-3 off at step 20.
CLIMBER = """
import pathlib, sys
import numpy as np
def save(step, out):
    mark = pathlib.Path(__file__).with_name(f"seen-{step}")
    d = 1e-9 * 2 ** (step / 7) if mark.exists() else 0.0
    mark.touch()
    odd = 0.5 if d and step == 20 and "odd" in sys.argv else 0.0
    np.savez(f"{out}/step_{step}.npz", w=np.array([3.0, 4.0 + 5 * d]), odd=np.array([0.001, odd]), n=step)
steps = [int(s) for s in sys.argv[2].split(",")]
for step in steps:
    save(step, sys.argv[1])
"""


@pytest.fixture
def climber(tmp_path):
    (tmp_path / "climber.py").write_text(CLIMBER)
    return [sys.executable, str(tmp_path / "climber.py"), "{out}"]


def test_a_command_that_saves_as_it_goes(climber, capsys):
    code = cli(["ladder", "--json", "--steps", "0,20,50,100", "--", *climber, "0,10,20,50,100"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and found["growth"]["kind"] == "growth"
    assert found["growth"]["doubling"] == pytest.approx(7.0, rel=1e-4)
    assert [r["relFro"] for r in found["rungs"]] == pytest.approx(
        [1e-9 * 2 ** (s / 7) for s in (0, 20, 50, 100)], rel=1e-4
    )
    assert found["failed"] == ["step 100: relFro 2e-05 is above --tol 1e-05"]
    assert found["rungs"][0]["moved"][0]["name"] == "w"


def test_a_command_run_for_each_rung(climber, capsys):
    assert cli(["ladder", "--steps", "7,14", "--", *climber, "{step}"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("run ") == 4 and captured.out.endswith("holds\n")


def test_an_anomaly_is_shown_with_the_tensors_that_moved(climber, capsys):
    assert cli(["ladder", "--steps", "0,5,20,35,49", "--tol", "0.2", "--", *climber, "0,5,20,35,49", "odd"]) == 0
    said = capsys.readouterr().out
    assert "breaking the trend: step 20" in said
    assert "step 20 breaks the trend; there moved: odd 500, w " in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--steps", "1,997"], "--steps: to save at each of them takes 997 checkpoints"),
        (["--steps", "x"], "--steps: 'x' is not a list of steps"),
        (["--seed", "7", "--", "train", "{out}"], "--seed: belongs to mlxdet's own training"),
        (["--", "train"], "no argument holds {out}"),
        (["--save-every", "5"], "No such option"),
        (["--steps", "5", "--", "sh", "-c", "echo > {out}/5.txt"], "step 5: no checkpoint in {out}"),
    ],
)
def test_wrong_usage_says_what_to_do(args, said, capsys):
    assert cli(["ladder", *args]) == 2
    assert said in capsys.readouterr().err


def test_mlxdet_is_identical_at_every_rung_from_the_drawn_weights_on(tmp_path, capsys):
    kept = tmp_path / "kept"
    assert cli(["ladder", "--steps", "0,4,10", *TINY, "--keep", str(kept)]) == 0
    assert "bit-identical at every rung\nholds\n" in capsys.readouterr().out

    from mlxdet.model.gpt import init

    flags = dict(zip([f[2:].replace("-", "_") for f in TINY[::2]], TINY[1::2], strict=True))
    model = configs.TrainConfig.of(**{k: int(v) if v.isdigit() else v for k, v in flags.items()}).resolve().model
    drawn = init(model, 256, 7)
    saved, _ = read_safetensors(kept / "a-0" / "out" / "checkpoints" / "00000001" / "model.safetensors")
    assert saved.keys() == drawn.keys()
    assert all(saved[k].to_numpy().tobytes() == drawn[k].tobytes() for k in drawn)


def test_a_switch_is_handed_on_as_a_switch(capsys):
    assert cli(["ladder", "--steps", "2", *TINY, "--no-spike-detect"]) == 0, capsys.readouterr().err


def planted(fault):
    return [sys.executable, "-m", "mlxdet.measure.faults", fault]


def test_a_planted_race_makes_the_ladder_grow():
    # A constant rate, so that nothing dies away; how straight the growth is varies with the race itself.
    flags = shlex.split("--layers 2 --width 64 --mlp 128 --context 32 --batch 4 --val-every 0 --device cpu --seed 7")
    rates = ["--schedule", "constant", "--warmup", "0", "--max-lr", "2e-2"]
    result = ladder([0, 4, 8, 12, 16, 20, 24, 28], flags=[*flags, *rates], trainer=planted("race"))
    distances = [rung.relfro for rung in result.rungs]
    assert distances[0] == 0 < distances[1] and distances[-1] > 3 * distances[1], distances
    assert not result.holds and len(result.failed) == 7 and result.growth.kind in ("growth", "irregular")
    assert len(result.rungs[-1].moved) == len(result.rungs[-1].pair.parts["weights"].tensors)


def test_weights_drawn_by_hash_order_differ_from_rung_zero_on(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    result = ladder([0], flags=TINY, trainer=planted("hash-order"))
    assert result.failed and result.rungs[0].relfro > 0.1
