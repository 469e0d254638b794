"""Spikes: every planted jump is found, nothing else is, and a resume judges as if nothing had happened."""

import json
import math

import numpy as np
import pytest

import mlxdet
from mlxdet.cli import run as command
from mlxdet.report.curves import picture
from mlxdet.training.spikes import FACTOR, MINIMUM, QUIET, WINDOW, Detector

STEPS = 2000


def clean(seed, steps=STEPS, sigma=0.08):
    """A run without spikes: loss falls as it does while training, the norm climbs through a warmup."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    loss = 1.8 + 3.7 * np.exp(-t / 60) + 0.8 * np.exp(-t / 600) + sigma * rng.standard_normal(steps)
    norm = (0.4 + 1.6 * np.minimum(t / 400, 1)) * np.exp(0.25 * rng.standard_normal(steps))
    return loss.tolist(), norm.tolist()


def spikes(losses, norms=None, detector=None):
    detector = detector or Detector()
    found = [detector.see(i + 1, v, norms[i] if norms else None) for i, v in enumerate(losses)]
    return [s for s in found if s]


def reference(values, at, window=WINDOW):
    """Median and deviation of the window before index `at`, by numpy."""
    w = np.array(values[max(0, at - window) : at])
    return np.median(w), 1.4826 * np.median(np.abs(w - np.median(w)))


def reference_log_norm(norms, at, window=WINDOW):
    w = np.log(norms[max(0, at - window) : at])
    median, deviation = reference(np.log(norms), at, window)
    return median, max(deviation, 0.75 * (np.sort(w)[int(0.95 * len(w))] - median), 0.01)


@pytest.mark.parametrize("seed", range(10))
def test_no_false_alarm_in_2000_clean_steps(seed):
    assert spikes(*clean(seed)) == []


@pytest.mark.parametrize("channel", ["loss", "gradient norm"])
def test_every_planted_jump_of_6_deviations_is_found_and_none_of_5(channel):
    rng = np.random.default_rng(3)
    places = sorted(rng.choice(np.arange(MINIMUM, STEPS), 150, replace=False).tolist())
    losses, norms = clean(1)
    for size, wanted in ((6.0 + 1e-9, [channel]), (5.0, [])):
        for at in places:
            loss, norm = losses[at], norms[at]
            if channel == "loss":
                median, deviation = reference(losses, at)
                loss, norm = median + size * max(deviation, 1e-3 * median), reference_log_norm(norms, at)[0]
            else:
                median, deviation = reference_log_norm(norms, at)
                loss, norm = reference(losses, at)[0], math.exp(median + size * deviation)
            before = range(max(0, at - WINDOW), at)
            detector = Detector.after({"step": i + 1, "loss": losses[i], "grad_norm": norms[i]} for i in before)
            spike = detector.see(at + 1, loss, norm)
            assert [s.reason for s in [spike] if s] == wanted, (at, size)
            if spike:
                measured = spike.loss_deviations if channel == "loss" else spike.norm_deviations
                assert measured == pytest.approx(size, abs=1e-6)


def test_two_half_spikes_in_one_step_are_one_spike():
    losses, norms = clean(2)
    at = 900
    loss, norm = reference(losses, at), reference_log_norm(norms, at)
    for dl, dn, reason in ((3.1, 3.1, "both"), (3.1, 2.9, None), (2.9, 3.1, None), (5.9, 0, None), (0, 5.9, None)):
        detector = Detector()
        spikes(losses[:at], norms[:at], detector)
        spike = detector.see(at + 1, loss[0] + dl * loss[1], math.exp(norm[0] + dn * norm[1]))
        assert (spike and spike.reason) == reason, (dl, dn)


def test_the_thresholds_known_before_a_step_are_those_that_judge_it():
    losses, norms = clean(4)
    detector = Detector()
    assert detector.limits().thresholds() == (math.inf,) * 4
    spikes(losses[:700], norms[:700], detector)
    limits = detector.limits()
    loss, norm, joint_loss, joint_norm = limits.thresholds()
    assert limits.judge(loss, 0.0) == "loss" and limits.judge(0.0, norm) == "gradient norm"
    assert limits.judge(math.nextafter(loss, 0), 0.0) is None and limits.judge(0.0, math.nextafter(norm, 0)) is None
    assert limits.judge(joint_loss, joint_norm) == "both"
    assert limits.judge(math.nextafter(joint_loss, 0), joint_norm) is None
    assert limits.judge(joint_loss, math.nextafter(joint_norm, 0)) is None


def test_it_does_not_blind_itself_with_its_own_spikes():
    losses, norms = clean(5)
    places = list(range(1000, 1050, 5))
    for at in places:  # all ten in one window
        losses[at] += 50.0
    losses[1060] += 1.0
    steps = [s.step for s in spikes(losses, norms)]
    assert steps == [at + 1 for at in [*places, 1060]]
    # What a mean and a standard deviation make of the same series: the first three hide the others.
    w = np.array(losses)
    blind = [i for i in [*places, 1060] if w[i] > w[i - WINDOW : i].mean() + FACTOR * w[i - WINDOW : i].std()]
    assert blind == places[:3]


def test_a_new_level_fires_once_and_becomes_the_level():
    losses, norms = clean(6)
    losses[1000:] = [v + 3.0 for v in losses[1000:]]
    found = spikes(losses, norms)
    assert [s.step for s in found if s.onset] == [1001]
    assert 1 < len(found) <= WINDOW // 2 and found[-1].step <= 1000 + WINDOW // 2
    losses[1500] += 1.5
    assert [s.step for s in spikes(losses, norms) if s.onset] == [1001, 1501]


def test_a_spike_ends_after_quiet_records():
    losses, norms = clean(7)
    for at in (600, 600 + QUIET, 700, 700 + QUIET + 1):
        losses[at] += 20.0
    assert [(s.step, s.onset) for s in spikes(losses, norms)] == [
        (601, True), (601 + QUIET, False), (701, True), (701 + QUIET + 1, True)
    ]  # fmt: skip


def test_falls_are_no_spikes():
    losses, norms = clean(8)
    losses[1200], norms[1200] = 0.0, 0.0
    assert spikes(losses, norms) == []


@pytest.mark.parametrize("value", [2.5, 0.0, -3.0])
def test_a_series_that_stands_still_does_not_fire_on_rounding(value):
    still = [value] * 300
    assert spikes(still, [1.0] * 300) == []
    rounding = [value * (1 + 1e-6 * (-1) ** i) for i in range(300)]
    assert spikes(rounding, [1.0 + 1e-6 * (-1) ** i for i in range(300)]) == []
    still[200] += 0.05
    assert [s.step for s in spikes(still)] == [201]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_the_first_value_that_is_not_finite_fires_and_does_not_enter_the_window(loss, norm):
    (spike,) = spikes([loss], [norm])
    assert spike.step == 1 and spike.reason == "not finite" and spike.onset
    losses, norms = clean(9)
    for i in range(500, 540):
        losses[i], norms[i] = loss, norm
    found = spikes(losses, norms)
    assert [s.step for s in found] == list(range(501, 541)) and [s.onset for s in found].count(True) == 1
    if not math.isfinite(loss):
        kept = [v for v in losses[440:540] if math.isfinite(v)]
        detector = Detector()
        spikes(losses[:540], norms[:540], detector)
        assert detector.limits().loss.median == np.median(kept)


def test_a_detector_made_from_the_end_of_a_log_goes_on_as_if_never_stopped():
    losses, norms = clean(10, 800)
    rng = np.random.default_rng(0)
    for at in rng.choice(800, 60, replace=False):
        losses[at] += rng.choice([1.0, 30.0, math.inf])
    records = [{"step": i + 1, "loss": v, "grad_norm": n} for i, (v, n) in enumerate(zip(losses, norms, strict=True))]
    whole = Detector()
    judged = [whole.see(r["step"], r["loss"], r["grad_norm"]) for r in records]
    assert sum(s is not None for s in judged) > 40
    forgetful = 0
    for cut in range(0, 800, 7):
        detector = Detector.after(records[:cut])
        short = Detector.after(records[max(0, cut - WINDOW // 2) : cut])
        rest = records[cut : cut + 60]
        assert [detector.see(r["step"], r["loss"], r["grad_norm"]) for r in rest] == judged[cut : cut + 60]
        forgetful += [short.see(r["step"], r["loss"], r["grad_norm"]) for r in rest] != judged[cut : cut + 60]
    assert forgetful > 50  # half a window is not enough, and this would show it


def test_too_little_history_judges_nothing_but_finiteness():
    assert spikes([2.0 + 0.01 * (i % 7) for i in range(MINIMUM - 1)] + [99.0]) == []
    assert [s.step for s in spikes([2.0 + 0.01 * (i % 7) for i in range(MINIMUM)] + [99.0])] == [MINIMUM + 1]


def test_the_picture_marks_the_bars_of_spikes():
    losses = [4.0 - 0.01 * i for i in range(300)]
    losses[150] = 1e9
    bars, marks = picture(losses, [150], width=60)
    assert len(bars) == 60 and marks == " " * 30 + "^" and bars[30] == "█" and bars[0] == "█" and bars[-1] == "▁"
    bars, marks = picture([*losses[:100], math.nan], [100], width=60)
    assert marks == " " * 59 + "^" and len(bars) == 60
    assert picture([], []) == ["", ""] and picture([math.nan], [0]) == ["", ""]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("spikes") / "run"
    mlxdet.train(
        mlxdet.TrainConfig.of(
            data=[str(text)], preset="nano", steps=40, batch=2, context=16, layers=1, val_every=0, device="cpu"
        ),
        path,
    )
    return path


def planted(trained, tmp_path, change):
    """A copy of the run's text files with its records changed."""
    for file in trained.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    change(records)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def test_the_verb_finds_nothing_in_a_clean_run(trained, capsys):
    assert command(["spikes", str(trained)]) == 0
    said = capsys.readouterr().out
    assert "40 steps" in said and "no spike" in said
    assert command(["spikes", str(trained), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spikes"] == []


def test_the_verb_names_step_numbers_and_rows(trained, tmp_path, capsys):
    records = planted(trained, tmp_path, lambda r: r[34].update(loss=40.0))
    assert command(["spikes", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (spike,) = found["spikes"]
    (step,) = spike["steps"]
    median, deviation = reference([r["loss"] for r in records], 34)
    assert spike["first"] == spike["last"] == step["step"] == 35 and step["rows"] == records[34]["rows"]
    assert step["reason"] == "loss" and step["loss_median"] == median
    assert step["loss_deviations"] == pytest.approx((40.0 - median) / deviation)
    assert step["grad_norm"] == records[34]["grad_norm"] and step["batch"] == records[34]["batch"]
    assert command(["spikes", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 spike, 1 step" in said and "^" in said and ", ".join(map(str, records[34]["rows"])) in said
    assert f"mlxdet batches {tmp_path} --step 35" in said
    assert command(["spikes", str(tmp_path), "--spike-factor", "100000"]) == 0


def test_a_run_that_is_going_on_can_be_read(trained, tmp_path, capsys):
    planted(trained, tmp_path, lambda r: None)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for size in range(len(whole) - 300, len(whole), 7):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:size])
        assert command(["spikes", str(tmp_path)]) == 0
    (tmp_path / "metrics.jsonl").unlink()
    assert command(["spikes", str(tmp_path)]) == 0
    assert "0 steps" in capsys.readouterr().out


def test_the_step_that_stopped_a_run_is_listed(trained, tmp_path, capsys):
    planted(trained, tmp_path, lambda r: r.__delitem__(slice(30, None)))
    event = {"event": "non-finite", "step": 31, "loss": "nan", "grad_norm": "inf", "rows": [7, 8]}
    stale = {**event, "step": 5}  # that step was trained again since, and is in the log
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in (stale, event, event)))
    assert command(["spikes", str(tmp_path), "--json"]) == 1
    (spike,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["spikes"]
    (step,) = spike["steps"]
    assert (step["step"], step["reason"], step["loss"], step["rows"]) == (31, "not finite", "nan", [7, 8])
    assert step["loss_median"] is not None and step["loss_deviations"] is None


def test_any_jsonl_with_a_loss_will_do(tmp_path, capsys):
    losses, _ = clean(11, 300)
    losses[250] += 5
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps({"loss": v}) + "\n" for v in losses) + '{"eval": 3}\n')
    assert command(["spikes", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [s["first"] for s in found["spikes"]] == [251] and found["ignored"] == 1 and found["records"] == 300
    assert command(["spikes", str(path)]) == 1
    said = capsys.readouterr().out
    assert "1 lines without a loss left out" in said and "mlxdet batches" not in said
    path.write_text('{"step": 10, "loss": 2.0}\n{"step": 20, "loss": NaN}\n{"step": 30, "loss": "inf"}\n')
    assert command(["spikes", str(path), "--json"]) == 1
    assert [s["step"] for s in json.loads(capsys.readouterr().out)["spikes"][0]["steps"]] == [20, 30]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", 'no line has a "loss"'),
        (b'{"step": 1}\n', 'no line has a "loss"'),
        (b'{"loss": 1.0}\nnonsense\n{"loss": 1.0}\n', ":2: is not JSON"),
        (b'{"loss": 1.0}\n[1]\n', ":2: is not a JSON object"),
        (b"\xff\xfe\x00\n\n", ":1: is not UTF-8"),
        (b"[" * 100_000 + b"\n\n", ":1: is nested too deeply"),
        (b'{"loss": "high"}\n', ":1: loss is 'high', not a number"),
        (b'{"loss": null}\n', ":1: loss is None, not a number"),
        (b'{"loss": true}\n', ":1: loss is True, not a number"),
        (b'{"loss": 1, "grad_norm": [1]}\n', ":1: grad_norm is 'list', not a number"),
        (b'{"loss": 1, "step": "a\\u001b[2J"}\n', ":1: step is 'a\\x1b[2J', not a whole number"),
        (b'{"loss": 1%s}\n' % (b"0" * 400), ":1: loss is 'int', not a number"),
        (b'{"loss": 1%s}\n' % (b"0" * 5000), ":1: holds a number beyond all measure"),
    ],
)
def test_what_cannot_be_read_is_refused_by_line(tmp_path, capsys, content, says):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert command(["spikes", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_wrong_usage_is_refused(tmp_path, capsys):
    assert command(["spikes", str(tmp_path)]) == 2
    assert "not a run" in capsys.readouterr().err
    for wrong in (["--spike-factor", "nan"], ["--spike-factor", "0"], ["--spike-window", "19"]):
        assert command(["spikes", str(tmp_path), *wrong]) == 2


def test_a_run_that_rolled_back_is_judged_as_while_training(trained, tmp_path, capsys):
    """Step 38 spikes, back to 30; 38 spikes again, and 36 is not finite: judged by what led there, not by the rest."""
    old = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for file in trained.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spiked = [{**old[37], "loss": 60.0}]
    again = [{**r, "detour": 1} for r in old[30:37]] + [{**old[37], "loss": 50.0, "detour": 1}]
    last = [{**r, "detour": 2} for r in old[30:35]]
    lines = [*old[:37], *spiked, *again, *last]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    stop = {"event": "spike", "step": 36, "loss": "nan", "grad_norm": "nan", "rows": [5], "detour": 2}
    back = [{"event": "rollback", "step": 38, "to": 30, "detour": n} for n in (1, 2)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in (*back, stop)))
    assert command(["spikes", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    steps = [s for spike in found["spikes"] for s in spike["steps"]]
    assert [(s["step"], s["detour"]) for s in steps] == [(38, 0), (38, 1), (36, 2)]
    assert [s["first"] for s in found["spikes"]] == [38, 38, 36]
    # The second is judged by the 37 steps before it on its branch: neither 60.0 nor what was taken back is among them.
    median, deviation = reference([r["loss"] for r in old], 37)
    for s, loss in zip(steps, (60.0, 50.0), strict=False):
        assert s["loss_median"] == median and s["loss_deviations"] == pytest.approx((loss - median) / deviation)
    assert command(["spikes", str(tmp_path)]) == 1
    assert f"mlxdet batches {tmp_path} --step 38 --detour 0" in capsys.readouterr().out


def test_the_rule_is_the_runs_unless_another_is_asked_for(text, tmp_path, capsys):
    run = mlxdet.train(
        mlxdet.TrainConfig.of(
            data=[str(text)], preset="nano", steps=3, batch=2, context=16, layers=1, val_every=0, device="cpu",
            spike_window=30, spike_factor=4.5,
        ),
        tmp_path / "run",
    )  # fmt: skip
    for options, rule in (([], (30, 4.5)), (["--spike-window", "50"], (50, 4.5)), (["--spike-factor", "7"], (30, 7))):
        assert command(["spikes", str(run.path), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["window"], found["factor"]) == rule


def test_a_narrow_terminal_cuts_no_number(trained, tmp_path, capsys, monkeypatch):
    planted(trained, tmp_path, lambda r: r[34].update(loss=40.0))
    monkeypatch.setenv("COLUMNS", "60")
    assert command(["spikes", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "40.0000" in said and "…" not in said and "too narrow for: median" in said
