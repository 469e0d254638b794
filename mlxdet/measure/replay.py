"""Steps of a run, run again from a checkpoint before them: does every logged bit come out the same?

Reads the run only, also while it is being trained: it takes no lock and writes nothing. What the trainer did in a step
is in one place, `Replayer.again`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlxdet import backends
from mlxdet.data.packing import RecordBatch
from mlxdet.errors import UsageError
from mlxdet.measure.history import history, spelled
from mlxdet.measure.substrate import Substrate, on_substrate
from mlxdet.training import provenance, reference
from mlxdet.training.corpora import AnyBatch, open_data
from mlxdet.training.detours import detour_at
from mlxdet.training.record import described
from mlxdet.training.run import Run
from mlxdet.training.schedule import learning_rate
from mlxdet.training.spikes import Detector

if TYPE_CHECKING:
    from mlxdet.measure.steptrace import StepTrace
    from mlxdet.training.step import Outcome, State, TrainStep

TRACE_FORMAT, TRACE_VERSION = "mlxdet step trace", 1
Watcher = Callable[[int, int], None]  # is told (step, last) before each step


@dataclass(frozen=True)
class Again:
    """One step run again. `found` has the fields of its log line; `differs`: (field, logged, found), None: not logged.

    `after` is the state that the run had after the step: the same as before it if the update was withheld.
    """

    batch: AnyBatch
    before: "State"
    after: "State"
    found: dict[str, Any]
    differs: list[tuple[str, Any, Any]] | None


class Replayer:
    """Runs steps of a run again, in the run's own config, on its own device. MLX is imported when one is made."""

    def __init__(self, run: Run, branch: int | None = None):
        """`branch`: see `history`. Raises UsageError if the text has changed or the device is not here."""
        self.run, self.config, self.history = run, run.config, history(run, branch)
        self.corpus, self.batches = open_data(run)
        self.backend = backends.activate(run.config.loop.device, run.config.loop.kernels)
        self.environment = provenance.environment_differences(run.manifest["environment"], self.backend.fingerprint())
        from mlxdet.training.states import States
        from mlxdet.training.step import TrainStep

        self.step_fn = TrainStep(self.config, self.corpus.vocab_size, self.backend)
        self.states = States(run, self.config, self.corpus.vocab_size)
        self.reference = reference.load(run.path, run.recipe) if self.step_fn.objective.reference else None
        if self.step_fn.objective.reference and self.reference is None:
            raise UsageError(f"{run.path / reference.FILE}: missing; `mlxdet resume {run.path}` computes it again")

    def state(self, before: int, start: int | None = None) -> "State":
        """Return the state of the newest checkpoint before step `before` (the initial state where there is none).

        `start`: of the checkpoint after that many steps instead, 0 being the initial state. A checkpoint that the
        training removes meanwhile is passed over. Raises UsageError for what another run trained (before a fork), and
        for a checkpoint of a later branch.
        """
        first = self.run.first
        if before <= first or (first and start == 0):
            raise UsageError(
                f"{self.run.path}: its steps up to {first} were trained by {self.run.manifest['forked']['run']}, which "
                f"it was forked from; replay them there"
            )
        if start:
            saved = self.run.load(start)
            if len(saved.past.detours) > self.history.branch:
                raise UsageError(f"--from: the checkpoint of step {start} is of a later branch, not of --detour "
                                 f"{self.history.branch}")  # fmt: skip
            return self.placed(self.states.of(saved))
        for step in reversed([s for s in self.run.steps() if s < before and start is None]):
            try:
                saved = self.run.load(step)
            except UsageError:
                if step in self.run.steps():
                    raise
                continue
            if len(saved.past.detours) <= self.history.branch:
                return self.placed(self.states.of(saved))
        if first:
            raise UsageError(f"{self.run.path}: no checkpoint before step {before} is left, and it begins at {first}")
        return self.placed(self.states.initial())

    @property
    def earliest(self) -> int:
        """The first step after which there is a state: 0, in a fork its first checkpoint."""
        return min(self.run.steps(), default=0) if self.run.first else 0

    def placed(self, state: "State") -> "State":
        """Return `state` with the detours that the branch has taken by then."""
        taken = tuple(d for d in self.history.detours if d.to <= state.step)
        return replace(state, past=replace(state.past, detours=taken))

    def batch(self, state: "State") -> AnyBatch:
        """Return what the trainer read for the step after `state`."""
        step = state.step + 1
        batch = self.batches.batch(step, detour_at(state.past.detours, step))
        if self.reference is None:
            return batch
        assert isinstance(batch, RecordBatch)
        return reference.with_reference(batch, self.reference)

    def again(self, state: "State") -> Again:
        """Do what the trainer did in the step after `state`, and compare it with the log."""
        batch, after, outcome = self.take(state, self.step_fn)
        found = self._record(batch, state, outcome)
        return Again(batch, state, after, found, self._compare(found))

    def take(self, state: "State", step_fn: "TrainStep") -> tuple[AnyBatch, "State", "Outcome"]:
        """Return batch, state and outcome of the step after `state`; its update withheld where the policy says so."""
        batch, step = self.batch(state), state.step + 1
        o, limits = self.config.optim, (math.inf,) * 4
        if o.on_spike == "skip":  # the one policy after which a run goes on from a withheld update
            limits = Detector.after(self.history.before(step), o.spike_window, o.spike_factor).limits().thresholds()
        after, outcome = step_fn.finish(state, batch, step_fn.begin(state, batch), limits)
        if not outcome.applied.item():
            after = replace(after, past=replace(after.past, skipped=after.past.skipped + 1))
        return batch, self.placed(after), outcome

    def _record(self, batch: AnyBatch, state: "State", outcome: "Outcome") -> dict[str, Any]:
        """Return the line that the trainer would log."""
        loss: Any = outcome.loss.item()
        norm: Any = outcome.grad_norm.item()
        applied, run = outcome.applied.item(), self.run
        tokens = run.first_tokens + (batch.step - run.first) * self.step_fn.units(batch)
        record = {
            "step": batch.step,
            "loss": loss,
            "loss_hex": loss.hex(),
            "grad_norm": norm,
            "lr": learning_rate(self.config.optim, batch.step, state.past.detours),
            **described(batch, outcome, self.step_fn.objective.measures, tokens),
        }
        record |= {"skipped": True} if not applied and math.isfinite(loss) and math.isfinite(norm) else {}
        return record | ({"detour": len(state.past.detours)} if state.past.detours else {})

    def _compare(self, found: dict[str, Any]) -> list[tuple[str, Any, Any]] | None:
        logged = self.history.records.get(found["step"])
        if logged is None:
            return None
        # The log of a step that was not finite has fewer fields.
        names = [*found, *(n for n in logged if n not in found)] if "loss_hex" in logged else list(logged)
        return [(n, logged.get(n), found.get(n)) for n in names if not _same(logged.get(n), found.get(n))]

    def walk(self, state: "State", last: int, watcher: Watcher | None = None) -> Iterator[Again]:
        """Yield the steps after `state` up to step `last`, run again one after the other."""
        while state.step < last:
            if watcher:
                watcher(state.step + 1, last)
            done = self.again(state)
            yield done
            state = done.after


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@dataclass
class Replay:
    """The result of `replay`. `first`: the first step that did not come out the same (step, field, logged, found)."""

    run: str
    step: int
    start: int  # steps done in the state it went from
    logged: int = 0  # steps that were compared
    same: int = 0
    unlogged: list[int] = field(default_factory=list)
    first: tuple[int, str, Any, Any] | None = None
    environment: list[tuple[str, Any, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)  # what step `step` gave now
    batch: str = ""
    trace: "StepTrace | None" = None
    before: "StepTrace | None" = None  # the step before, for comparison; None if it was not run
    rows: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    substrates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reproduced(self) -> bool:
        return self.first is None and self.logged > 0

    @property
    def headline(self) -> str:
        """Return the result in a line."""
        if self.first is None:
            return f"{self.same} of {self.logged} logged steps reproduced, to the bit"
        step, name, logged, found = self.first
        rest = f"{self.same} of {self.logged} logged steps reproduced"
        return f"step {step} did not reproduce: {name} was logged as {logged!r}, replayed as {found!r}; {rest}"

    def count(self, done: Again) -> None:
        """Take a step that was run again into account."""
        step = done.batch.step
        if done.differs is None:
            self.unlogged.append(step)
            return
        self.logged += 1
        self.same += not done.differs
        if done.differs and self.first is None:
            self.first = (step, *done.differs[0])

    def as_dict(self) -> dict[str, Any]:
        """Return all that was measured, JSON-able; numbers that are not finite are strings."""
        assert self.trace
        names = ("step", "field", "logged", "replayed")
        return spelled(
            {
                "format": TRACE_FORMAT,
                "version": TRACE_VERSION,
                "run": self.run,
                "step": self.step,
                "start": self.start,
                "reproduced": self.reproduced,
                "logged": self.logged,
                "same": self.same,
                "unlogged": self.unlogged,
                "first_difference": dict(zip(names, self.first, strict=True)) if self.first else None,
                "environment_differences": [list(d) for d in self.environment],
                "record": self.record,
                "lr": self.trace.lr,
                "clip": self.trace.clip,
                "rows": self.rows,
                "worst_tokens": self.worst,
                "token_losses": self.trace.token_losses.tolist(),
                "layers": self.trace.layers,
                "tensors": self.trace.tensors,
                "before": {"step": self.before.step, "loss": self.before.loss, "grad_norm": self.before.grad_norm,
                           "layers": self.before.layers, "tensors": self.before.tensors} if self.before else None,
                "substrates": self.substrates,
            }
        )  # fmt: skip


def replay(
    run: Run,
    step: int,
    *,
    start: int | None = None,
    branch: int | None = None,
    substrates: Sequence[Substrate] = (),
    watcher: Watcher | None = None,
) -> Replay:
    """Run `run` again up to `step` and look into that step.

    From the nearest checkpoint before it, or that after `start` steps (0: from the beginning). `substrates`: where the
    last step is run once more, from the same state. Raises UsageError for a step that is not in the log.
    """
    if start is not None and not 0 <= start < step:
        raise UsageError(f"--from: {start} is not before step {step}")
    replayer = Replayer(run, branch)
    replayer.history.require(step)
    from mlxdet.measure.steptrace import rows_of, trace_step, worst_tokens

    state = replayer.state(step, start)
    result = Replay(str(run.path), step, state.step, environment=replayer.environment)
    for done in replayer.walk(state, step, watcher):
        result.count(done)
        if done.batch.step == step - 1:
            result.before = trace_step(replayer.step_fn, done.before, done.batch)
    result.record, result.batch = done.found, done.batch.digest
    result.trace = trace_step(replayer.step_fn, done.before, done.batch)
    result.rows = rows_of(done.batch, result.trace.token_losses, replayer.corpus)
    result.worst = worst_tokens(done.batch, result.trace.token_losses, replayer.corpus)
    if substrates:
        own = Substrate.of(run.config)
        rows = [own.row(done.found, "as the run")]
        rows += [on_substrate(s, run, replayer.backend, done.before, done.batch, replayer.corpus) for s in substrates]
        result.substrates = rows
    return result
