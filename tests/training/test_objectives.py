"""Objectives against hand-computed values, float64 and finite differences; masks, batch mates, exact zeros."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxdet.auditing.audit import audit_targets
from mlxdet.config import TrainConfig
from mlxdet.model import gpt, lora
from mlxdet.model.ops import ops_for
from mlxdet.training import objectives, reference
from mlxdet.training.objectives import OBJECTIVES

LN2 = float(np.float32(math.log(2.0)))
PAIRS = ("dpo", "orpo", "simpo")
# One pair by hand. Scored: the last two tokens of the chosen answer (sum -1.0, mean -0.5), the last of the rejected.
LOGP = np.array([[-7.0, -0.25, -0.75], [-9.0, -8.0, -2.0]], np.float32)
SCORED = np.array([[0, 1, 1], [0, 0, 1]], bool)
REFERENCE = np.array([-1.5, -1.0], np.float32)


def sums(name, logp=LOGP, scored=SCORED, reference=REFERENCE, beta=None, gamma=None):
    o = OBJECTIVES[name]
    got = o.sums(
        mx.array(logp), mx.array(scored), mx.array(reference), beta or o.beta, o.gamma if gamma is None else gamma
    )
    assert got.dtype == mx.float32 and got.shape == (len(o.measures),)
    return np.array(got).tolist()


def test_tokens_are_summed_over_the_scored_ones_alone():
    assert sums("sft") == sums("lm") == [3.0]
    assert sums("sft", scored=np.zeros((2, 3), bool)) == [0.0]
    hidden = np.where(SCORED, LOGP, np.nan).astype(np.float32)
    assert sums("sft", hidden) == [3.0] and all(map(math.isfinite, sums("dpo", hidden)))


def test_dpo_by_hand():
    """r_c = 0.1 * (-1 - -1.5) = 0.05, r_r = 0.1 * (-2 - -1) = -0.1, loss = log(1 + exp(-0.15)) = 0.6209571."""
    assert sums("dpo") == pytest.approx([0.62095713, 0.05, -0.1, 0.15, 1.0], rel=1e-6)


def test_simpo_by_hand():
    """r_c = 2 * -0.5 = -1, r_r = 2 * -2 = -4, loss = log(1 + exp(-(3 - 0.5))) = 0.0788897."""
    assert sums("simpo") == pytest.approx([0.07888973, -1.0, -4.0, 3.0, 1.0], rel=1e-6)


def test_orpo_by_hand():
    """odds_c = -0.5 - log(1 - exp(-0.5)) = 0.4327521, odds_r = -2 - log(1 - exp(-2)) = -1.8545865,
    loss = 0.5 + 0.1 * log(1 + exp(-2.2873386)) = 0.5096706."""
    assert sums("orpo") == pytest.approx([0.50967059, -0.05, -0.2, 0.15, 1.0], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -1e-9, -(2.0**-24), -1e-6, -1e-3, -0.7, -3.0, -20.0, -90.0, -3e3])
def test_log_odds_equals_float64(value):
    a = min(float(np.float32(value)), -(2.0**-24))
    want = a - math.log(-math.expm1(a))
    got, slope = mx.value_and_grad(objectives.log_odds)(mx.array(value, mx.float32))
    assert got.item() == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert math.isfinite(slope.item())
    if value < -1e-7:
        assert slope.item() == pytest.approx(1.0 / -math.expm1(a), rel=1e-5)


def test_softplus_and_its_slope_equal_float64():
    x = np.array([0.0, -0.0, 1e-4, -1e-4, 1.0, -1.0, 17.0, -17.0, 88.0, -88.0, 1e4, -1e4, 3e38, -np.inf], np.float32)
    x64 = x.astype(np.float64)
    value = np.maximum(x64, 0) + np.log1p(np.exp(-np.abs(x64)))
    slope = np.exp(np.minimum(x64, 0) - np.log1p(np.exp(-np.abs(x64))))
    got, gradient = mx.vjp(objectives.softplus, [mx.array(x)], [mx.ones(len(x))])
    np.testing.assert_allclose(np.array(got[0]), value, rtol=3e-7, atol=1e-38)
    np.testing.assert_allclose(np.array(gradient[0]), slope, rtol=1e-6, atol=1e-38)
    # Why it is not written the other way: dpo's first step would have no gradient.
    other = mx.grad(lambda x: mx.maximum(x, 0) + mx.log1p(mx.exp(-mx.abs(x))))(mx.array(0.0))
    assert other.item() != 0.5


def test_sums_over_pairs_are_a_tree():
    for n in range(1, 20):
        parts = np.random.default_rng(n).integers(-50, 50, (5, n)).astype(np.float32)
        assert np.array_equal(np.array(objectives._tree(mx.array(parts))), parts.sum(1))
    one = np.float32(math.log(2.0))
    assert np.array(objectives._tree(mx.full((1, 64), one))).tolist() == [64 * LN2]
    assert sum([one] * 16, np.float32(0)) != 16 * one  # one after another


@pytest.mark.parametrize("pairs", [1, 2, 8, 16, 64])
def test_policy_equal_to_reference_is_exactly_ln_2_and_margin_0(pairs):
    rng = np.random.default_rng(pairs)
    logp = -np.abs(rng.standard_normal((2 * pairs, 9))).astype(np.float32)
    scored = rng.random((2 * pairs, 9)) < 0.5
    same = np.array(objectives.scored_sums(mx.array(logp), mx.array(scored)))
    assert sums("dpo", logp, scored, same) == [pairs * LN2, 0.0, 0.0, 0.0, 0.0]
    gradient = mx.grad(lambda p: OBJECTIVES["dpo"].sums(p, mx.array(scored), mx.array(same), 0.1)[0])(mx.array(logp))
    want = np.where(scored, np.repeat([-0.05, 0.05], pairs)[:, None], 0.0)  # beta / 2, up and down
    np.testing.assert_allclose(np.array(gradient), want, rtol=1e-6)
    other = same + np.float32(1e-3) * (np.arange(2 * pairs) == 0)
    assert 0 != sums("dpo", logp, scored, other)[3] == pytest.approx(-1e-4, rel=1e-2)


@pytest.mark.parametrize("name", ["sft", *PAIRS])
def test_gradient_equals_finite_differences_in_float64(name):
    rng = np.random.default_rng(7)
    logp = -np.abs(rng.standard_normal((6, 5)))
    scored = rng.random((6, 5)) < 0.6
    scored[:, 2] = True
    ref = -3 * np.abs(rng.standard_normal(6))
    o = OBJECTIVES[name]

    def loss64(p):
        total, mean = (p * scored).sum(1), (p * scored).sum(1) / scored.sum(1)
        if name == "sft":
            return -total.sum()
        if name == "dpo":
            x, first = o.beta * (total - ref), 0.0
        elif name == "simpo":
            x, first = o.beta * mean, 0.0
        else:
            x, first = mean - np.log(-np.expm1(mean)), -mean[:3].sum()
        z = x[:3] - x[3:] - (o.gamma or 0.0)
        return first + (o.beta if name == "orpo" else 1.0) * np.log1p(np.exp(-z)).sum()

    args = (mx.array(scored), mx.array(ref.astype(np.float32)), o.beta, o.gamma)
    value, gradient = mx.value_and_grad(lambda p: o.sums(p, *args)[0])(mx.array(logp.astype(np.float32)))
    assert value.item() == pytest.approx(loss64(logp), rel=1e-6)
    for i, j in np.ndindex(6, 5):
        step = np.zeros((6, 5))
        step[i, j] = 1e-5
        want = (loss64(logp + step) - loss64(logp - step)) / 2e-5
        assert np.array(gradient)[i, j] == pytest.approx(want, rel=1e-4, abs=1e-7)
        assert scored[i, j] or np.array(gradient)[i, j] == 0.0


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_does_not_depend_on_its_mates(name):
    """Alone, beside another pair, and beside a longer one that pads it."""
    mate = -np.abs(np.random.default_rng(3).standard_normal((2, 7))).astype(np.float32)
    padded = np.concatenate([LOGP, np.full((2, 4), -30.0, np.float32)], axis=1)
    shown = np.concatenate([SCORED, np.zeros((2, 4), bool)], axis=1)
    alone, beside = sums(name), sums(name, mate, np.ones((2, 7), bool))
    logp = np.stack([padded[0], mate[0], padded[1], mate[1]])
    scored = np.stack([shown[0], np.ones(7, bool), shown[1], np.ones(7, bool)])
    both = sums(name, logp, scored, REFERENCE[[0, 0, 1, 1]])
    assert both == pytest.approx(np.add(alone, beside).tolist(), rel=1e-6)
    shifted = sums(name, logp, np.roll(scored, 1, axis=1), REFERENCE[[0, 0, 1, 1]])  # a mask off by one
    assert shifted[0] != pytest.approx(both[0], rel=1e-3)


@pytest.mark.parametrize("name", ["sft", *PAIRS])
def test_no_scored_token_and_certain_tokens_make_no_nan(name):
    o = OBJECTIVES[name]
    for logp, scored in [(LOGP, np.zeros((2, 3), bool)), (np.zeros((2, 3), np.float32), SCORED)]:
        f = lambda p, s=scored: o.sums(p, mx.array(s), mx.array(REFERENCE), o.beta, o.gamma)[0]  # noqa: E731
        value, gradient = mx.value_and_grad(f)(mx.array(logp))
        assert math.isfinite(value.item()) and np.isfinite(np.array(gradient)).all()


# With the model

VOCAB = 30
CONFIG = TrainConfig.of(preset="nano", layers=2, context=12, width=16, heads=2, mlp=32).resolve().model


def model(backend, dtype=mx.float32):
    ops = ops_for(backend)
    weights = {k: mx.array(v * 8) for k, v in gpt.init(CONFIG, VOCAB, 0).items()}

    def logp(w, tokens, e=None):
        e = gpt.embed(w, tokens[:, :-1], dtype) if e is None else e
        return -ops.cross_entropy(gpt.logits(w, gpt.hidden(w, e, CONFIG, ops)), tokens[:, 1:])

    return weights, logp


def pairs(n, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (2 * n, 13)).astype(np.int32)
    return tokens, np.arange(12)[None, :] >= rng.integers(2, 9, (2 * n, 1))


def test_log_probabilities_of_targets_and_mask_by_hand(backend):
    """ids [10, 11, 12, 13], the answer is 12: its log-probability is read at the input 11."""
    weights, logp = model(backend)
    tokens = np.array([[10, 11, 12, 13]], np.int32)
    scored = np.array([[False, True, False]])
    got = objectives.scored_sums(logp(weights, mx.array(tokens)), mx.array(scored)).item()
    h = gpt.hidden(weights, gpt.embed(weights, mx.array([[10, 11]]), mx.float32), CONFIG, ops_for(backend))
    z = np.array(gpt.logits(weights, h), np.float64)[0, 1]
    assert got == pytest.approx(z[12] - np.log(np.exp(z - z.max()).sum()) - z.max(), rel=1e-5)


@pytest.mark.parametrize(("dtype", "adapters"), [(mx.float32, False), (mx.bfloat16, False), (mx.float32, True)])
def test_reference_from_a_compiled_forward_pass_gives_exact_zeros_in_the_step(backend, dtype, adapters):
    """On the CPU the forward pass has the same bits with and without a backward pass, and with fresh adapters."""
    base, logp = model(backend, dtype)
    score = mx.compile(lambda w, t, s: objectives.scored_sums(logp(w, t), s))
    policy = base
    if adapters:
        fresh = lora.init(gpt.shapes(CONFIG, VOCAB), 4, lora.parse_targets("all"), 0)
        policy = {k: mx.array(v) for k, v in fresh.items()}

    def loss(w, base, tokens, scored, ref):
        found = OBJECTIVES["dpo"].sums(logp(lora.joined(base, w, 2.0), tokens), scored, ref, 0.1)
        return found[0], found

    step = mx.compile(lambda *a: mx.value_and_grad(loss)(*a))
    tokens, scored = map(mx.array, pairs(16))
    ref = mx.array(np.array(score(base, tokens, scored)))
    (_, found), grads = step(policy, base, tokens, scored, ref)
    assert np.array(found).tolist() == [16 * LN2, 0.0, 0.0, 0.0, 0.0]
    assert max(mx.abs(g).max().item() for g in grads.values()) > 1e-3
    moved = {k: w + 1e-2 for k, w in policy.items()}
    assert np.array(step(moved, base, tokens, scored, ref)[0][1])[3] != 0.0


@pytest.mark.parametrize("target", ["metal", "cuda", "cpu"])
@pytest.mark.parametrize("name", ["sft", *PAIRS])
def test_no_objective_has_a_leak(backend, name, target):
    from mlxdet.backends import Backend

    weights, logp = model(Backend(target, "deterministic"))
    tokens, scored = map(mx.array, pairs(4))
    o = OBJECTIVES[name]

    def gradient(w, e, tokens, scored, ref):
        f = lambda w, e: o.sums(logp(w, tokens, e), scored, ref, o.beta, o.gamma)[0]  # noqa: E731
        return mx.value_and_grad(f, argnums=(0, 1))(w, e)

    e = gpt.embed(weights, tokens[:, :-1], mx.float32)
    found = audit_targets(gradient, (weights, e, tokens, scored, mx.zeros(8)), {}, (target,))[target]
    assert found.ok and found.primitives > 200, str(found)


def test_accumulated_pairs_and_tokens_weigh_the_same():
    """Two micro-batches of unequal lengths, added and divided once, are one batch."""
    scored = pairs(4)[1]
    logp = -np.abs(np.random.default_rng(1).standard_normal(scored.shape)).astype(np.float32)
    halves = [[0, 1, 4, 5], [2, 3, 6, 7]]
    for name in ("sft", *PAIRS):
        ref = logp.sum(1)
        parts = [sums(name, logp[h], scored[h], ref[h]) for h in halves]
        assert np.add(*parts) == pytest.approx(np.array(sums(name, logp, scored, ref)), rel=1e-6)


# The cache of reference values


class Corpus:
    rows = 11


class Batches:
    """Rows 0 to 9 of 11, in order, epoch after epoch; 2 micro-batches of 2 pairs."""

    corpus, batch_size, accumulation, train_rows = Corpus, 2, 2, 10

    def __init__(self):
        self.asked = []

    def batch(self, step):
        self.asked.append(step)
        rows = np.arange((step - 1) * 4, step * 4) % 10
        tokens = rows.reshape(2, 1, 2, 1).repeat(2, 1).reshape(2, 4, 1) + np.array([[0], [0], [100], [100]])
        return reference.RecordBatch(step, tokens.astype(np.int32), tokens[..., :0] > 0, None, None, rows, rows, "")


def test_each_row_has_the_value_of_the_first_batch_that_holds_it():
    calls = []

    def score(tokens, scored):
        calls.append(tokens[:, 0].tolist())
        return (tokens[:, 0] + 1000 * len(calls)).astype(np.float32)

    batches = Batches()
    values = reference.compute(batches, 100, score)
    assert batches.asked == [1, 2, 3]  # an epoch: 10 rows, 4 a step
    assert values[0].tolist() == [1000, 1100] and values[9].tolist() == [5009, 5109] and np.isnan(values[10]).all()
    assert len(calls) == 5  # the last micro-batch holds rows 0 and 1 again
    assert reference.of_batch(values, batches.batch(1)).tolist() == [[1000, 1001, 1100, 1101], [2002, 2003, 2102, 2103]]
    short = reference.compute(Batches(), 1, score)
    assert np.isnan(short[4:]).all() and not np.isnan(short[:4]).any()
    with pytest.raises(ValueError, match="step 2 holds rows without"):
        reference.of_batch(short, batches.batch(2))


def test_reference_file_is_whole_or_refused(tmp_path):
    values = np.array([[1.5, -2.0], [np.nan, np.nan]], np.float32)
    assert reference.load(tmp_path, "a") is None
    reference.save(tmp_path, values, "a")
    assert reference.load(tmp_path, "a").tobytes() == values.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == [reference.FILE]
    with pytest.raises(reference.UsageError, match=r"damaged, or of another run"):
        reference.load(tmp_path, "b")
    raw = (tmp_path / reference.FILE).read_bytes()
    for at in range(0, len(raw), 3):
        (tmp_path / reference.FILE).write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(reference.UsageError, match=reference.FILE):
            reference.load(tmp_path, "a")
    (tmp_path / reference.FILE).write_bytes(raw[:-1])
    with pytest.raises(reference.UsageError, match=reference.FILE):
        reference.load(tmp_path, "a")
