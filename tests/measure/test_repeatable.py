"""assert_repeatable: what repeats passes, what races is reported with its place and size, and nothing else is blamed."""

import random
import secrets
import threading
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from mlxdet import UsageError, assert_repeatable
from mlxdet.measure import faults
from mlxdet.measure.repeatable import ONE_BY_ONE, PERTURBATIONS, NotRepeatable
from mlxdet.model import embedding

IDS = mx.array(np.random.default_rng(0).integers(0, 4, 200).astype(np.int32))
GRAD = mx.array(np.random.default_rng(1).standard_normal((200, 8)).astype(np.float32))


def sums(ids, grad):
    return {"embedding": embedding.segment_sum("scatter", ids, grad, 4), "twice": [grad * 2]}


@pytest.fixture
def race(monkeypatch):
    """The planted fault: the segment sum adds in a random order, as float atomics do."""
    monkeypatch.setattr(embedding, "METHODS", dict(embedding.METHODS))
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # so that the fault's own setting is taken back
    faults.race()


def test_a_function_that_repeats_passes(backend):
    result = assert_repeatable(sums, IDS, GRAD)
    assert (result.n, result.identical, result.outputs, result.moved, result.drew) == (20, 20, 2, {}, [])
    assert {name for name, _ in PERTURBATIONS} == result.under.keys() and all(k == 0 for _, k in result.under.values())
    assert sum(times for times, _ in result.under.values()) == 19
    assert str(result) == "20 of 20 evaluations identical, 2 arrays compared"


def test_a_race_is_reported_with_k_of_n_its_place_and_its_size(backend, race):
    first = np.array(embedding.scatter(IDS, GRAD, 4))
    with pytest.raises(NotRepeatable) as caught:
        assert_repeatable(sums, IDS, GRAD, n=12)
    result, text = caught.value.result, str(caught.value)
    assert isinstance(caught.value, AssertionError) and result.moved.keys() == {"embedding"}
    moved = result.moved["embedding"]
    assert result.identical == 12 - moved.times and 0 < moved.times <= 11
    # Rounding of two orders of 200 additions: not nothing, and far below the sum itself.
    assert 0 < moved.max_abs < 1e-4 * np.abs(first).max() and 0 < moved.relfro < 1e-5
    assert f"{result.identical} of 12 evaluations identical" in text and "races" in text
    assert f"embedding in {moved.times} of 11 repetitions, max abs" in text and "twice" not in text
    assert not result.drew


def test_numbers_are_those_of_the_bits(backend):
    calls = iter([0.0, 3.0, 4.0])

    def shifting():
        return mx.array([3.0, 4.0]) + mx.array([next(calls), 0.0])

    with pytest.raises(NotRepeatable) as caught:
        assert_repeatable(shifting, n=3)
    moved = caught.value.result.moved["output"]
    assert (caught.value.result.identical, moved.times, moved.max_abs) == (1, 2, 4.0)
    assert moved.relfro == pytest.approx(4 / 5)  # |(4, 0)| / |(3, 4)|


def test_bits_decide(backend):
    assert assert_repeatable(lambda: mx.array([float("nan"), -0.0]) * 1).identical == 20
    zeros = iter([0.0, -0.0])
    with pytest.raises(NotRepeatable):
        assert_repeatable(lambda: mx.array([next(zeros)]), n=2)
    shapes = iter([2, 3])
    with pytest.raises(NotRepeatable, match="shape, dtype or structure"):
        assert_repeatable(lambda: mx.zeros((next(shapes),)), n=2)
    trees = iter([{"a": mx.ones(1)}, {"b": mx.ones(1)}])
    with pytest.raises(NotRepeatable) as caught:
        assert_repeatable(lambda: next(trees), n=2)
    assert caught.value.result.moved.keys() == {"a", "b"}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.int8, mx.bool_, mx.complex64, mx.uint32])
def test_outputs_of_any_dtype_and_tree(backend, dtype):
    def fn(x):
        return {"mlx": (x.astype(dtype), None), "numpy": [np.arange(3), 2.5], "scalar": x.sum()}

    result = assert_repeatable(fn, GRAD, n=4)
    assert (result.identical, result.outputs) == (4, 4)


def test_random_numbers_are_named_and_not_called_a_race(backend):
    def noisy(x):
        return x + mx.random.normal(x.shape)

    with pytest.raises(NotRepeatable, match=r"other random numbers from mx\.random.*seed=") as caught:
        assert_repeatable(noisy, GRAD, n=3)
    assert "races" not in str(caught.value) and caught.value.result.drew == ["mx.random"]
    assert assert_repeatable(noisy, GRAD, n=6, seed=7).identical == 6
    for name, draw in (("numpy.random", np.random.random), ("random", random.random)):
        with pytest.raises(NotRepeatable) as caught:
            assert_repeatable(lambda draw=draw: mx.array(draw()), n=3)
        assert caught.value.result.drew == [name]
        assert assert_repeatable(lambda draw=draw: mx.array(draw()), n=3, seed=2**64 - 1).identical == 3


def test_a_race_is_still_called_one_when_seeded(backend, race):
    with pytest.raises(NotRepeatable, match="races"):
        assert_repeatable(lambda: (sums(IDS, GRAD), mx.random.normal((2,))), n=6, seed=1)


@pytest.mark.parametrize("failing", [None, *range(len(PERTURBATIONS))])
def test_generators_cache_limit_and_threads_are_put_back_also_after_a_failure(backend, failing):
    calls = iter(range(100))

    def fn(x):
        mx.random.normal((2,))
        np.random.random()
        random.random()
        if next(calls) == failing:  # one repetition for each perturbation
            raise RuntimeError("mine")
        return x + 0

    def state():
        return mx.random.state[0].tolist(), np.random.get_state()[1].tolist(), random.getstate()

    mx.random.seed(123456789 << 32 | 5)
    limit = mx.set_cache_limit(12345678)
    before, threads = state(), threading.active_count()
    try:
        if failing is None:
            assert assert_repeatable(fn, GRAD, seed=3, n=7).identical == 7
        else:
            with pytest.raises(RuntimeError, match="mine"):
                assert_repeatable(fn, GRAD, seed=3)
        assert state() == before and threading.active_count() == threads
    finally:
        assert mx.set_cache_limit(limit) == 12345678


def test_a_call_that_changes_what_it_starts_from_is_not_called_a_race(backend):
    model, optimizer = nn.Linear(8, 8), optim.SGD(0.1)

    def step(x):
        grads = nn.value_and_grad(model, lambda m: m(x).sum())(model)[1]
        optimizer.update(model, grads)
        return model.weight + 0

    with pytest.raises(UsageError, match=r"changes variable model \(.*in all\)"):
        assert_repeatable(step, GRAD)

    def given(m, x):
        m.bias = m.bias + 1
        return m(x)

    with pytest.raises(UsageError, match="changes argument 0 \\(bias"):
        assert_repeatable(given, model, GRAD)
    with pytest.raises(UsageError, match="changes argument 0"):
        assert_repeatable(partial(given, model), GRAD)
    assert assert_repeatable(lambda m, x: m(x), model, GRAD).identical == 20


def test_what_is_not_evaluated_anew_is_refused(backend):
    kept = GRAD + 1
    with pytest.raises(UsageError, match="nothing is evaluated a second time"):
        assert_repeatable(lambda: kept)
    for nothing in (None, 3.0, [], {"a": None}):
        with pytest.raises(UsageError, match="no array"):
            assert_repeatable(lambda value=nothing: value)
    with pytest.raises(UsageError, match="at least two"):
        assert_repeatable(sums, IDS, GRAD, n=1)


def test_each_perturbation_is_really_in_place(backend, monkeypatch):
    seen, evaluated, queued = {}, {}, {}
    main, real, real_async = threading.current_thread(), mx.eval, mx.async_eval
    names = iter(PERTURBATIONS)

    def fn(x):
        seen["now"] = name = next(names)[0]
        queued[name] = queued.pop("next", 0)
        seen[name] = mx.get_cache_memory(), threading.active_count()
        return [x * i for i in range(3)]

    def noting(group):
        if threading.current_thread() is main and "now" in seen:
            evaluated.setdefault(seen["now"], []).append(group if isinstance(group, mx.array) else len(group))
        real(group)

    def noting_async(array):
        queued["next"] = queued.get("next", 0) + 1
        real_async(array)

    monkeypatch.setattr(mx, "eval", noting)
    monkeypatch.setattr(mx, "async_eval", noting_async)
    mx.clear_cache()
    threads = threading.active_count()
    assert_repeatable(fn, GRAD, n=len(PERTURBATIONS))
    assert seen["fresh buffers"][0] == 0 < seen["buffers full of NaN"][0]
    assert {n for n, (_, count) in list(seen.items())[1:] if count > threads} == {"a busy thread"}
    assert {n for n, times in queued.items() if times} == {"a busy stream"}
    assert evaluated["nothing changed"][0] == 3
    last_first = [np.array(a)[0, 0] / np.array(GRAD)[0, 0] for a in evaluated[ONE_BY_ONE]]
    assert last_first == [2, 1, 0]


def test_the_cache_really_holds_nan(backend):
    """A buffer that is handed out again has the NaN in it until somebody writes."""
    from mlxdet.measure import repeatable

    made = []
    kept = [mx.full((100,), float("nan"))]
    real = mx.full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "full", lambda *a: made.append(a) or real(*a))
        with repeatable._used_buffers({"x": repeatable.from_tree([kept[0]], "x").tensors["0"]}):
            assert mx.get_cache_memory() > 0
    assert made[0][0] == (101,) and all(np.isnan(value) for _, value in made)


def test_state_that_the_host_keeps_is_named_as_a_possible_cause(backend):
    noise = [0]

    def fn():
        noise[0] += secrets.randbits(8) + 1
        return mx.array(noise[0])

    with pytest.raises(NotRepeatable, match="keeps state"):
        assert_repeatable(fn, n=4)
