"""The steps of one training: take, log, validate, save, and do what a spike asks for, until done or told to stop.

The host stays off the critical path: the graph of step s+1 is built and its batch is at hand while step s runs; then
the result of step s is read and logged, and s+1 starts at once. Under a policy that withholds updates only the gradient
of s+1 is built ahead, as its update hangs on the judgement of s. A withheld update is withheld on the device
(`Outcome.applied`), and nothing that is not finite is ever saved.
"""

import math
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxdet.config import TrainConfig
from mlxdet.data.batches import Prefetcher
from mlxdet.data.packing import RecordBatch, RecordBatches
from mlxdet.errors import Fault, UsageError
from mlxdet.seeds import Splitmix64, seed_everything, stream
from mlxdet.training import checkpoint, reference
from mlxdet.training.corpora import AnyBatch, AnyBatches, AnyCorpus
from mlxdet.training.detours import MOST, Detour, Past, detour_at, target
from mlxdet.training.record import described
from mlxdet.training.run import METRICS, Logs, Run, timeline
from mlxdet.training.schedule import learning_rate
from mlxdet.training.spikes import Detector, Spike


class Listener(Protocol):
    """What a training tells whoever watches. Nothing it does reaches a bit of the result."""

    def started(self, run: Run, step: int) -> None: ...
    def stepped(self, record: dict[str, Any], timing: dict[str, Any]) -> None: ...
    def validated(self, step: int, loss: float) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def spiked(self, spike: Spike, action: str) -> None: ...
    def stopped(self, run: Run, step: int, reason: str) -> None: ...
    def close(self) -> None: ...  # always last, after an error too


class Quiet:
    """A listener that does nothing."""

    def started(self, run: Run, step: int) -> None: ...
    def stepped(self, record: dict[str, Any], timing: dict[str, Any]) -> None: ...
    def validated(self, step: int, loss: float) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def spiked(self, spike: Spike, action: str) -> None: ...
    def stopped(self, run: Run, step: int, reason: str) -> None: ...
    def close(self) -> None: ...


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT or SIGTERM sets. A second signal ends the process as usual."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    names = (signal.SIGINT, signal.SIGTERM)
    old = {name: signal.getsignal(name) for name in names}

    def handle(number: int, frame: Any) -> None:
        asked.set()
        for name in names:
            signal.signal(name, old[name])

    for name in names:
        signal.signal(name, handle)
    try:
        yield asked
    finally:
        for name in names:
            signal.signal(name, old[name])


def resident_bytes() -> int:
    """Return the memory this process holds now, in bytes; on systems without /proc the most it has held."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts it in bytes


class _Rollback(Exception):
    """A spike sends the run back."""

    def __init__(self, spike: Spike):
        super().__init__(spike)
        self.spike = spike


class Trainer:
    """One training of one run: what the steps share. MLX is imported here, after the backend was pinned."""

    def __init__(
        self, run: Run, config: TrainConfig, corpus: AnyCorpus, batches: AnyBatches, backend: Any, listener: Listener
    ):
        import mlx.core as mx

        from mlxdet.training.evaluate import Evaluator
        from mlxdet.training.states import States
        from mlxdet.training.step import TrainStep

        self.mx = mx
        self.run, self.config, self.corpus, self.batches, self.listener = run, config, corpus, batches, listener
        seed_everything(config.seeds.seed)
        if config.loop.cache_limit is not None:
            mx.set_cache_limit(int(config.loop.cache_limit * 1e9))
        self.step_fn = TrainStep(config, corpus.vocab_size, backend)
        self.evaluator = Evaluator(config, backend)
        checkpoint.sweep(run.checkpoints)
        if run.first and not run.steps():
            raise UsageError(f"{run.path}: the fork was interrupted before it began; remove it and fork again")
        self.states = States(run, config, corpus.vocab_size)
        self.state = self.states.of(run.load()) if run.steps() else self.states.initial()
        self.policy = config.optim.on_spike
        self.detector = self._detector()
        self.windows: list[Any] = batches.validation(config.optim.batch)  # of rows: (tokens, scored)
        self.reference = np.zeros((0, 2), np.float32)  # of dpo, with that of the windows
        self.window_reference: list[np.ndarray] = []

    def _refer(self) -> None:
        """Get the log-probabilities under the reference: those of a run are computed once, before its first step."""
        assert isinstance(self.batches, RecordBatches)
        base = self.states.base()

        def score(tokens: np.ndarray, scored: np.ndarray) -> np.ndarray:
            return self.evaluator.score(base, tokens, scored)

        found = reference.load(self.run.path, self.run.recipe)
        if found is None:
            began = time.perf_counter()
            # After a rollback any row may be read.
            steps = self.config.optim.steps if self.policy != "rollback" else self.batches.train_rows
            found = reference.compute(self.batches, steps, score)
            reference.save(self.run.path, found, self.run.recipe)
            rows = int(np.count_nonzero(np.isfinite(found[:, 0])))
            self.logs.event("reference", step=self.state.step, rows=rows, seconds=round(time.perf_counter() - began, 3))
        self.reference = found
        self.window_reference = [score(*part) for part in self.windows]

    def batch(self, step: int, detours: tuple[Detour, ...]) -> AnyBatch:
        """Return what is read in `step`."""
        batch = self.batches.batch(step, detour_at(detours, step))
        if isinstance(batch, RecordBatch) and self.step_fn.objective.reference:
            return reference.with_reference(batch, self.reference)
        return batch

    def _detector(self) -> Detector | None:
        """Return the detector that has seen the steps up to the state, or None if there is no detection."""
        o, state = self.config.optim, self.state
        if not o.spike_detect:
            return None
        branch = len(state.past.detours)
        lines = (r for r in self.run.records(branches=True) if r.get("detour", 0) <= branch)
        seen = [r for r in timeline(lines) if r["step"] <= state.step]
        decides = self.policy in ("skip", "rollback")
        if decides and (len(seen) != state.step or (seen and seen[-1]["step"] != state.step)):
            raise UsageError(
                f"{self.run.path / METRICS}: does not hold every step up to {state.step}, and --on-spike {self.policy} "
                f"judges by them"
            )
        return Detector.after(seen, o.spike_window, o.spike_factor)

    def train(self, resumed: list[list[Any]] | None) -> Run:
        """Run to the last step. `resumed`: None for a new run, else the accepted differences of environment."""
        with Logs(self.run) as self.logs, _signals() as asked:
            if resumed is None:
                origin = self.run.manifest.get("forked")
                self.logs.event("start", step=self.state.step, **({"forked": origin} if origin else {}))
            else:
                self.logs.event("resume", step=self.state.step, exact=not resumed, environment=resumed)
                if resumed:
                    self.logs.metrics.forget_after(self.state.step, len(self.state.past.detours))
                    self.logs.validation.forget_after(self.state.step, len(self.state.past.detours))
            try:
                self.listener.started(self.run, self.state.step)
                if self.step_fn.objective.reference and self.state.step < self.config.optim.steps:
                    self._refer()
                while self.state.step < self.config.optim.steps:
                    try:
                        self._steps(asked)
                        break
                    except _Rollback as rollback:
                        self._roll_back(rollback.spike)
                done = self.state.step == self.config.optim.steps
                self.run.stopped = "done" if done else "interrupted"
                self.logs.event("stop", step=self.state.step, reason=self.run.stopped)
                self.listener.stopped(self.run, self.state.step, self.run.stopped)
            finally:
                self.listener.close()
        return self.run

    def _steps(self, asked: threading.Event) -> None:
        loop, last, start = self.config.loop, self.config.optim.steps, self.state.step
        if start == 0 and not self.state.past.detours:
            self._validate()
        detours = self.state.past.detours
        back = self.config.optim.rollback_steps if self.policy == "rollback" else 0

        def batch_of(step: int) -> AnyBatch:
            return self.batch(step, detours)

        self._mark = time.perf_counter()
        pending: tuple[AnyBatch, Any] | None = None
        with Prefetcher(batch_of, start + 1, last + 1, loop.prefetch) as prefetched:
            for batch in prefetched:
                total = self.step_fn.begin(self.state, batch)
                if self.policy == "warn":
                    # Nothing hangs on the step before: its result is read while this one is being built.
                    self.state, outcome = self.step_fn.finish(self.state, batch, total)
                if pending:
                    self._record(*pending)
                if self.policy != "warn":
                    assert self.detector is not None
                    limits = self.detector.limits().thresholds()
                    self.state, outcome = self.step_fn.finish(self.state, batch, total, limits)
                more = [outcome.measures] if outcome.measures is not None else []
                self.mx.async_eval(*self.state.arrays(), outcome.loss, outcome.grad_norm, outcome.applied, *more)
                pending = (batch, outcome)
                step, stop = batch.step, asked.is_set()
                validate = loop.val_every > 0 and (step % loop.val_every == 0 or step == last)
                sample = loop.sample_every > 0 and step % loop.sample_every == 0
                save = stop or step == last or (loop.save_every > 0 and step % loop.save_every == 0)
                save = save or (back > 0 and step % back == 0)
                if validate or sample or save:
                    self._record(*pending)
                    pending = None
                    if validate:
                        self._validate()
                    if sample:
                        self._sample()
                    if save:
                        try:
                            self._save()
                        except checkpoint.NotFinite:
                            # The next step will say so and do what the policy asks for, whatever is saved and when.
                            if stop or step == last:
                                raise
                    self._mark = time.perf_counter()
                if stop:
                    break

    def _record(self, batch: AnyBatch, outcome: Any) -> None:
        """Wait for a step, log it, and do what a spike asks for.

        Raises Fault on a non-finite loss or gradient and where the policy is to stop, _Rollback where it is to go back.
        """
        applied = bool(outcome.applied.item())
        loss, norm = outcome.loss.item(), outcome.grad_norm.item()
        finite = math.isfinite(loss) and math.isfinite(norm)
        limits = self.detector.limits() if self.detector else None
        spike = self.detector.see(batch.step, loss, norm) if self.detector else None
        withheld = not finite or (self.policy != "warn" and spike is not None)
        if applied == withheld:
            raise Fault(
                f"step {batch.step}: loss {loss}, gradient norm {norm}: the device says the update was "
                f"{'made' if applied else 'withheld'}, the host would have it otherwise (limits {limits}): do not "
                f"trust this machine"
            )
        if finite:
            record = {
                "step": batch.step,
                "loss": loss,
                "loss_hex": loss.hex(),
                "grad_norm": norm,
                "lr": learning_rate(self.config.optim, batch.step, self.state.past.detours),
                **described(
                    batch, outcome, self.step_fn.objective.measures,
                    self.run.first_tokens + (batch.step - self.run.first) * self.step_fn.units(batch),
                ),
            }  # fmt: skip
            record |= {"skipped": True} if withheld and self.policy == "skip" else {}
            record |= self._branch()
            self.logs.metrics.write(record)
        if spike is not None or not finite:
            self._spiked(batch, spike, loss, norm)
        if not finite:
            return
        now = time.perf_counter()
        seconds = now - self._mark
        if self.config.loop.throttle:
            time.sleep(seconds * self.config.loop.throttle / (1.0 - self.config.loop.throttle))
            now = time.perf_counter()
        self._mark = now
        timing = {
            "step": batch.step,
            "seconds": round(seconds, 6),
            "tokens_per_s": round(batch.tokens[..., 1:].size / max(seconds, 1e-9), 1),
            "active": self.mx.get_active_memory(),
            "cache": self.mx.get_cache_memory(),
            "peak": self.mx.get_peak_memory(),
            "resident": resident_bytes(),
        }
        self.logs.timing.write(timing)
        self.listener.stepped(record, timing)

    def _spiked(self, batch: AnyBatch, spike: Spike | None, loss: float, norm: float) -> None:
        """Do what the policy says about a spike or a value that is not finite (`spike` is None without detection)."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        action = self.policy if finite or self.policy == "rollback" else "stop"
        if spike is not None and (spike.onset or action != "warn"):
            numbers = {
                k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in asdict(spike).items()
            }
            self.logs.event("spike", **numbers, action=action, rows=batch.rows.tolist(), **self._branch())
            self.listener.spiked(spike, action)
        if action == "skip":
            past = self.state.past
            self.state = replace(self.state, past=replace(past, skipped=past.skipped + 1))
        if action == "rollback" and spike is not None and len(self.state.past.detours) < MOST:
            raise _Rollback(spike)
        if action in ("stop", "rollback"):
            self._stop_before(batch, spike, loss, norm)

    def _stop_before(self, batch: AnyBatch, spike: Spike | None, loss: float, norm: float) -> None:
        """Save the state before the update of `batch`, which was withheld, and raise Fault."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.logs.event(
                "non-finite", step=batch.step, loss=str(loss), grad_norm=str(norm), rows=batch.rows.tolist(),
                **self._branch(),
            )  # fmt: skip
            why = "not finite, so the update was not made"
        else:
            assert spike is not None
            why = f"a spike ({spike.text()}), so it stopped before the update"
        if self.policy != "warn" and batch.step > 1:
            # The update was withheld and no later one is under way: the arrays are those of the step before.
            self.state = replace(self.state, step=batch.step - 1)
            try:
                self._save()
            except checkpoint.NotFinite as error:  # the state is what is broken: no news, and nothing to save
                why += f" ({error})"
        steps = self.run.steps()
        kept = f"step {steps[-1]}" if steps else "none was saved yet"
        detours = ", ".join(str(d.step) for d in self.state.past.detours)
        again = f" It had rolled back at steps {detours}." if detours else ""
        way = f" `mlxdet resume {self.run.path} --on-spike warn` goes on all the same." if self.policy == "stop" else (
            f" `mlxdet fork {self.run.path} --at {batch.step - 1} --on-spike warn --out NEW` goes on all the same."
        )  # fmt: skip
        raise Fault(
            f"step {batch.step}: loss {loss}, gradient norm {norm}: {why}; last good checkpoint: {kept}.{again}"
            f"{way if spike and spike.reason != 'not finite' else ''} Rows of the batch: {batch.rows.tolist()} "
            f"(`mlxdet batches {self.run.path} --step {batch.step}` shows them)"
        )

    def _roll_back(self, spike: Spike) -> None:
        """Take the run back to before a spike; from there it reads other data, with smaller steps at first."""
        o, past = self.config.optim, self.state.past
        to = max(target(spike.step, past.detours, o.rollback_steps), self.run.first)
        number = len(past.detours) + 1
        saved = self.states.of(self.run.load(to)) if to else self.states.initial()  # first: it may be damaged
        self.logs.event("rollback", step=spike.step, to=to, detour=number, reason=spike.reason,
                        factor=o.rollback_factor, ramp=o.rollback_ramp)  # fmt: skip
        checkpoint.discard(self.run.checkpoints, to)
        # What was withheld before the detour stays withheld; what the branch went through is gone with it.
        self.state = replace(saved, past=Past(saved.past.skipped, (*past.detours, Detour(spike.step, to))))
        self.detector = self._detector()

    def _validate(self) -> None:
        if self.windows and self.config.loop.val_every:
            model, more = self.step_fn.model(self.state), {}
            if isinstance(self.batches, RecordBatches):
                count = sum(len(tokens) for tokens, _ in self.windows) // self.batches.corpus.sides
                more = self.evaluator.means(model, self.windows, self.window_reference)
                loss = more.pop("loss")
            else:
                count = sum(map(len, self.windows))
                loss = self.evaluator.loss(model, self.windows)
            if not math.isfinite(loss):  # the next step will stop the run, or take it back
                self.logs.event("validation", step=self.state.step, loss=str(loss))
                return
            record = {"step": self.state.step, "loss": loss, "loss_hex": loss.hex(), "windows": count, **more}
            self.logs.validation.write(record | self._branch())
            self.listener.validated(self.state.step, loss)

    def _sample(self) -> None:
        from mlxdet.model.generate import generate

        rng = Splitmix64(stream(self.config.seeds.seed, "sample", self.state.step))
        prompt = self.corpus.tokenizer.encode(self.config.loop.sample_prompt).tolist()
        ids = generate(
            self.step_fn.model(self.state), self.config.model, self.step_fn.ops, self.step_fn.dtype, prompt,
            self.config.loop.sample_tokens, temperature=0.8, top_k=0, rng=rng,
        )  # fmt: skip
        text = self.corpus.decode(np.array([*prompt, *ids]))
        self.logs.event("sample", step=self.state.step, text=text)
        self.listener.sampled(self.state.step, text)

    def _save(self) -> None:
        if self.state.step in self.run.steps():
            return
        self.logs.metrics.sync()
        self.logs.validation.sync()
        snapshot = replace(self.state.snapshot(), base=self._base_unchanged())
        path = checkpoint.save(self.run.checkpoints, snapshot, self.run.recipe)
        removed = checkpoint.rotate(self.run.checkpoints, self.config.loop.keep, self._anchors())
        self.logs.event("save", step=self.state.step, removed=removed)
        self.listener.saved(self.state.step, path)

    def _base_unchanged(self) -> str | None:
        """Return the digest of the frozen base, None without one. Raises Fault if it is no longer the run's."""
        if not self.state.base:
            return None
        from mlxdet.model.lora import base_digest

        digest = base_digest({name: np.array(w) for name, w in self.state.base.items()})
        if digest != self.run.base:
            raise Fault(
                f"step {self.state.step}: the frozen base has changed (digest {digest} instead of {self.run.base}), so "
                f"nothing is saved: do not trust this machine"
            )
        return digest

    def _branch(self) -> dict[str, int]:
        """Return what a line of the logs says about the rollbacks before it."""
        detour = len(self.state.past.detours)
        return {"detour": detour} if detour else {}

    def _anchors(self) -> set[int]:
        """Return the steps whose checkpoints are kept: where a fork began, and what a rollback may still ask for."""
        first, back = {self.run.first}, self.config.optim.rollback_steps
        if self.policy != "rollback":
            return first
        oldest = target(self.state.step + 1, self.state.past.detours, back)
        return first | {oldest, *(s for s in range(oldest, self.state.step + 1) if s % back == 0)}
