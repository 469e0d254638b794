"""Learning rates against values worked out by hand from the published formulas."""

import math

import pytest

from mlxdet.config import TrainConfig
from mlxdet.training.schedule import learning_rate


def rates(**values):
    config = TrainConfig.of(**values).resolve().optim
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_in_every_schedule(schedule):
    assert rates(schedule=schedule, steps=20, warmup=4, max_lr=1.0, min_lr=0.0)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine():
    r = rates(steps=8, warmup=0, max_lr=1.0, min_lr=0.2)
    assert r[0] == 1.0 and r[4] == pytest.approx(0.6) and r[2] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert r == sorted(r, reverse=True) and r[-1] > 0.2


@pytest.mark.parametrize("shape, quarter", [("1-sqrt", 0.5), ("linear", 0.75), ("cosine", 0.8535533905932737)])
def test_wsd_a_quarter_into_its_decay(shape, quarter):
    r = rates(schedule="wsd", steps=20, warmup=0, max_lr=1.0, min_lr=0.0, decay_steps=8, decay_shape=shape)
    assert r[:13] == [1.0] * 13 and r[14] == pytest.approx(quarter, abs=1e-15)


def test_constant_stays_at_the_top():
    assert rates(schedule="constant", steps=6, warmup=2, max_lr=0.5)[1:] == [0.5] * 5


def test_one_step_and_no_warmup():
    assert rates(steps=1, max_lr=0.1) == [0.1]
