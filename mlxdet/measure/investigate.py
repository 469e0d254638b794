"""Why a step spiked: the experiments a person would do by hand, and what follows from them.

    replay           from the nearest checkpoint, bit by bit                     does it happen again?
    other batches    in the state before the step                                is it the state?
    the same batch   in other states: a while before, and of another init seed   is it the data?
    rows left out    one at a time                                               which row?
    learning rate    half (a quarter, an eighth) of it in the steps before       is it too high?
    substrate        other kernels; float32 where the run is in bfloat16         is it the arithmetic?
    lineage          do the steps before the checkpoint lead to it?              was the state changed from outside?

The step is judged by the run's own log, a batch in a state by other batches in that state (`measure/probe.py`).
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxdet.config import tuned
from mlxdet.data.batches import Batch
from mlxdet.errors import UsageError
from mlxdet.measure.replay import Again, Replayer
from mlxdet.measure.substrate import Substrate, on_substrate
from mlxdet.measure.verdict import REPEATS, Investigation, against, conclude, unlike
from mlxdet.seeds import stream
from mlxdet.training.corpora import batches_of
from mlxdet.training.run import Run
from mlxdet.training.spikes import MINIMUM, Detector, Limits

if TYPE_CHECKING:
    from mlxdet.measure.probe import Figure
    from mlxdet.training.step import State

CONTROLS = 24  # other batches
LOOKBACK = 20  # steps before, for "a while before" and for the learning rate
SIBLING = 200  # steps of a training with another init seed, at most


def investigate(
    run: Run,
    step: int,
    *,
    branch: int | None = None,
    controls: int = CONTROLS,
    sibling: int = SIBLING,
    window: int | None = None,
    factor: float | None = None,
    watcher: Callable[[str], None] | None = None,
) -> Investigation:
    """Find out why `step` of `run` spiked, or that it did not.

    `controls`: how many other batches, at least MINIMUM. `sibling`: most steps to train a model of another init seed.
    `window`, `factor`: of the spike rule; default the run's. `watcher` is told what is being done. Raises UsageError
    for a step that is not in the log, or too early to have a level.
    """
    say = watcher or (lambda text: None)
    rule = run.config.optim
    if controls < MINIMUM:
        raise UsageError(f"--controls: {controls} is too few for a median and a deviation; at least {MINIMUM}")
    if tuned(run.config):
        raise UsageError(
            f"{run.path}: investigate is for new models on text; `mlxdet replay {run.path} --step {step}` looks into "
            f"the step of any run"
        )
    replayer = Replayer(run, branch)
    logged = replayer.history.require(step)
    from mlxdet.measure.probe import judged

    log = Detector.after(
        replayer.history.before(step), window or rule.spike_window, factor or rule.spike_factor
    ).limits()
    figure = judged(log, logged["loss"], logged["grad_norm"])
    if log.loss is None and figure.reason is None:
        raise UsageError(
            f"--step: {step} comes too early to be judged: {len(replayer.history.before(step))} steps are logged "
            f"before it, a level needs {MINIMUM}"
        )
    norm = float(np.exp(log.log_norm.median)) if log.log_norm else None
    found = Investigation(str(run.path), step, figure, log.loss.median if log.loss else None, norm,
                          replayer.environment)  # fmt: skip
    work = _Work(replayer, log, found, say)
    done = work.replay()
    if figure.reason is None:
        found.verdict = "no spike"
        found.headline = f"no spike here: {against(figure)} of the steps before" + unlike(found)
    elif found.first_difference and found.replayed and found.replayed.reason is None:
        found.verdict = "machine"
        found.headline = "the spike does not come again: " + unlike(found).removeprefix(", but ")
        if found.environment:
            found.causes.append("the environment is not the run's, so this is no proof of a fault of the machine")
        if found.repeats_identical < REPEATS:
            found.causes.append(
                f"repeated here, {found.repeats_identical} of {REPEATS} times the step gives the same bits"
            )
    else:
        work.experiments(done, controls, sibling)
        conclude(found)
    return found


class _Work:
    """One investigation: what its experiments share."""

    def __init__(self, replayer: Replayer, log: Limits, found: Investigation, say: Callable[[str], None]):
        from mlxdet.measure.probe import Probe

        self.replayer, self.log, self.found, self.say = replayer, log, found, say
        self.step, self.config = found.step, replayer.config
        self.probe = Probe(self.config, replayer.corpus.vocab_size, replayer.backend)

    def replay(self) -> Again:
        """Run from the nearest checkpoint to the step, and that step REPEATS times."""
        from mlxdet.measure.probe import judged

        found, replayer = self.found, self.replayer
        self.start = state = replayer.state(self.step)
        found.start = state.step
        self.back = max(replayer.earliest, self.step - 1 - min(LOOKBACK, self.step // 2))
        self.early: State | None = None if state.step > self.back else state
        for done in replayer.walk(state, self.step, lambda s, n: self.say(f"replay: step {s} of {n}")):
            if done.before.step <= self.back and self.early is not None:
                self.early = done.before
            if done.differs and found.first_difference is None:
                found.first_difference = (done.batch.step, *done.differs[0])
        found.replayed = judged(self.log, done.found["loss"], done.found["grad_norm"])
        again = [replayer.again(done.before).found for _ in range(REPEATS)]
        found.repeats_identical = sum(str(a) == str(done.found) for a in again)  # as text, NaN equals NaN
        return done

    def experiments(self, done: Again, controls: int, sibling: int) -> None:
        """Do all that needs the state before the step."""
        from mlxdet.measure.probe import compare_in, leave_out
        from mlxdet.measure.steptrace import rows_of, trace_step

        found, batch, state = self.found, done.batch, done.before
        assert isinstance(batch, Batch)  # of text: see `investigate`
        if self.early is None:
            self._lineage()
        assert self.early is not None
        others = self._others(controls)
        trace = trace_step(self.replayer.step_fn, state, batch)
        found.rows = rows_of(batch, trace.token_losses, self.replayer.corpus)
        self._grown(trace, self.early, batch)
        before = state.step - self.early.step
        states: list[tuple[str, State | None]] = [("before the step", state)]
        states += [(f"{before} step{'s' if before > 1 else ''} earlier", self.early)] if before else []
        for name, other in (*states, ("another init seed", self._sibling(min(sibling, self.step - 1)))):
            if other is not None:
                self.say(f"other batches: {name}")
                found.places.append(compare_in(self.probe, name, other, batch, others, self.log))
        self.say("rows left out")
        found.without = leave_out(self.probe, state, batch, self.log)
        self._together(state, batch)
        if not (found.lineage and found.lineage["moved"] and not found.environment):
            self._learning_rates(batch)  # where the steps before do not lead here, their learning rate says nothing
        own = Substrate.of(self.config)
        tries = [replace(own, kernels="default" if own.kernels == "deterministic" else "deterministic")]
        tries += [replace(own, dtype="float32")] if own.dtype != "float32" else []
        found.substrates = [self._on(own, done.found, "as the run")]
        for where in tries:
            self.say(f"substrate: {where}")
            row = on_substrate(where, self.replayer.run, self.replayer.backend, state, batch, self.replayer.corpus)
            found.substrates.append(self._on(where, row, row["note"]))

    def _others(self, count: int) -> list[Any]:
        """Return batches of a data seed of their own, as if they were the step's."""
        seed = stream(self.config.seeds.data_seed or 0, "investigate")
        source = batches_of(self.config.replace(data_seed=seed), self.replayer.corpus)
        return [replace(source.batch(i), step=self.step) for i in range(1, count + 1)]

    def _sibling(self, steps: int) -> "State | None":
        """Return a model of another init seed and data seed after so many steps; None if it did not stay finite."""
        if steps < 1:
            return None
        from mlxdet.training.step import TrainStep, initial_state

        seed = stream(self.config.seeds.init_seed or 0, "sibling")
        config = self.config.replace(init_seed=seed, data_seed=seed)
        source, step_fn = (
            batches_of(config, self.replayer.corpus),
            TrainStep(config, self.replayer.corpus.vocab_size, self.replayer.backend),
        )
        state = initial_state(config, self.replayer.corpus.vocab_size)
        while state.step < steps:
            self.say(f"another init seed: step {state.step + 1} of {steps}")
            state, outcome = step_fn(state, source.batch(state.step + 1))
            if not outcome.applied.item():
                return None
        return state

    def _lineage(self) -> None:
        """Go to the nearest checkpoint from one before it: is it what those steps lead to?"""
        replayer, start = self.replayer, self.found.start
        state = replayer.state(self.back + 1)
        first = None
        self.early = state
        for done in replayer.walk(state, start, lambda s, n: self.say(f"lineage: step {s} of {n}")):
            if done.after.step <= self.back:
                self.early = done.after
            if done.differs and first is None:
                first = (done.batch.step, *done.differs[0])
        moved = _moved(done.after, self.start)
        self.found.lineage = {"from": state.step, "to": start, "moved": moved, "first_difference": first}

    def _together(self, state: "State", batch: Batch) -> None:
        """Leave out the most telling rows together, one more each time, until the spike is gone; at most half.

        Of a large batch few rows were left out one at a time: after those come the others, the largest loss first.
        """
        from mlxdet.measure.probe import Without, judged

        single = [w.rows[0] for w in self.found.without if len(w.rows) == 1]
        ordered = [*single, *(r["row"] for r in self.found.rows if r["row"] not in single)]
        for count in range(1, len(batch.rows) // 2 + 1):
            rows = tuple(ordered[:count])
            figure = judged(self.log, *self.probe.measure(state, batch, rows))
            if figure.reason is None:
                if count > 1:  # some of them may only have come before those that matter
                    rows, figure = self._needed(state, batch, rows, figure)
                self.found.together = Without(rows, figure)
                return

    def _needed(
        self, state: "State", batch: Batch, rows: tuple[int, ...], figure: "Figure"
    ) -> "tuple[tuple[int, ...], Figure]":
        """Return `rows` without those whose absence makes no difference to there being a spike."""
        from mlxdet.measure.probe import judged

        for row in rows:
            fewer = tuple(r for r in rows if r != row)
            tried = judged(self.log, *self.probe.measure(state, batch, fewer))
            if tried.reason is None:
                rows, figure = fewer, tried
        return rows, figure

    def _learning_rates(self, batch: Batch) -> None:
        """Train the steps before again at half the learning rate, and less until the spike is gone."""
        from mlxdet.measure.probe import judged
        from mlxdet.training.step import TrainStep

        o = self.config.optim
        assert o.min_lr is not None and self.early is not None
        if self.early.step == self.step - 1:
            return  # there are no steps before
        for share in (0.5, 0.25, 0.125):
            config = self.config.replace(max_lr=o.max_lr * share, min_lr=o.min_lr * share)
            step_fn = TrainStep(config, self.replayer.corpus.vocab_size, self.replayer.backend)
            state, finite = self.early, True
            while state.step < self.step - 1 and finite:
                self.say(f"learning rate x {share}: step {state.step + 1} of {self.step - 1}")
                _, state, outcome = self.replayer.take(state, step_fn)
                finite = bool(np.isfinite(outcome.loss.item()) and np.isfinite(outcome.grad_norm.item()))
            figure = judged(self.log, *self.probe.measure(state, batch))
            self.found.learning_rates.append({"share": share, "from": self.early.step, **asdict(figure)})
            if figure.reason is None:
                return

    def _on(self, where: Substrate, row: dict[str, Any], note: str) -> dict[str, Any]:
        from mlxdet.measure.probe import judged

        return where.row(row, note) | asdict(judged(self.log, row["loss"], row["grad_norm"]))

    def _grown(self, trace: Any, early: "State", batch: Batch) -> None:
        """Compare layers and tensors with those of the earlier state on the same batch, the most grown first."""
        from mlxdet.measure.steptrace import trace_step

        was = trace_step(self.replayer.step_fn, early, replace(batch, step=early.step + 1))
        for now, then in zip(trace.layers, was.layers, strict=True):
            keys = ("activation_rms", "grad_norm", "weight_norm")
            self.found.layers.append({"layer": now["layer"], **{k: [then[k], now[k]] for k in keys}})
        pairs = [(n, t) for n, t in zip(trace.tensors, was.tensors, strict=True) if t["weight_max"]]
        pairs.sort(key=lambda p: -p[0]["weight_max"] / p[1]["weight_max"])
        self.found.tensors = [{"name": n["name"], "weight_max": [t["weight_max"], n["weight_max"]]} for n, t in pairs]


def _moved(reached: "State", saved: "State") -> list[dict[str, Any]]:
    """Return the tensors of a checkpoint that are not what was reached, the value furthest off in each, worst first."""
    a, b = reached.snapshot(), saved.snapshot()
    moved = []
    for kind, one, two in (("", a.weights, b.weights), (".m", a.first, b.first), (".v", a.second, b.second)):
        for k in one:
            x, y = one[k], two[k]
            differ = int(np.count_nonzero(x.view(np.uint32) != y.view(np.uint32)))
            if differ:
                gap = np.abs(y.astype(np.float64) - x)
                at = np.unravel_index(int(np.argmax(np.where(np.isnan(gap), np.inf, gap))), x.shape)
                moved.append({"name": k + kind, "differing": differ, "of": x.size, "index": [int(i) for i in at],
                              "reached": float(x[at]), "saved": float(y[at])})  # fmt: skip
    return sorted(moved, key=lambda m: -abs(m["saved"] - m["reached"]))
