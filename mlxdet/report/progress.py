"""Live progress: a bar on a terminal, plain flushed lines into a pipe or a file. With --json both go to stderr."""

import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mlxdet.config import TrainConfig
from mlxdet.report.curves import sparkline
from mlxdet.training.run import METRICS, Run
from mlxdet.training.spikes import Spike
from mlxdet.training.trainer import Listener


def listener(config: TrainConfig, as_json: bool) -> Listener:
    """Return what shows the progress of a training of `config` on this process's output."""
    console = _Console(stderr=as_json, highlight=False, soft_wrap=True)
    return Bar(console, config) if console.is_terminal else Lines(console, config)


class _Console(Console):
    """A console that leaves a reader that went away to its user; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def rate(tokens_per_s: float) -> str:
    """Return a speed as people read it: 812 tok/s, 12.3k tok/s."""
    return f"{tokens_per_s:.0f} tok/s" if tokens_per_s < 1000 else f"{tokens_per_s / 1000:.1f}k tok/s"


def duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss below an hour."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}" if minutes >= 60 else f"{minutes}:{s:02d}"


def memory(timing: dict[str, Any]) -> str:
    """Return the memory that MLX holds now, its cache, and its peak, in GB."""
    active, cache, peak = (timing[k] / 1e9 for k in ("active", "cache", "peak"))
    return f"mem {active:.2f}+{cache:.2f} GB (peak {peak:.2f})"


def _read(run: Run) -> str:
    """Return what a run reads and learns, in a line or two."""
    corpus, manifest, tune = run.manifest["corpus"], run.manifest, run.config.tune
    where = f"({corpus['kind']}, vocabulary {corpus['vocab']})"
    if "rows" not in corpus:
        said = f"text: {corpus['tokens']:,} tokens {where}, {manifest['val_tokens']:,} of them for validation"
    else:
        said = (
            f"rows: {corpus['kept']:,} of {corpus['rows']:,} kept, {corpus['scored']:,} of {corpus['tokens']:,} tokens "
            f"scored {where}, template {corpus['template']}, {manifest['val_rows']:,} rows for validation"
        )
    if "base" not in manifest:
        return said if tune.objective == "lm" else f"{said}\nobjective: {tune.objective}"
    start = f"objective: {tune.objective}, from {manifest['base']['run']} at step {manifest['base']['step']}"
    lora = f", {manifest['trainable']:,} weights in adapters of rank {tune.lora_rank}" if tune.lora_rank else ""
    return f"{said}\n{start}{lora}"


class Lines:
    """Progress as plain lines."""

    def __init__(self, console: Console, config: TrainConfig):
        self.console, self.config = console, config
        self.steps = config.optim.steps
        self.began, self.first = time.monotonic(), 0

    def say(self, text: str) -> None:
        # Text from a model can hold anything; it is printed as it is, never as markup.
        try:
            self.console.print(text, markup=False)
            self.console.file.flush()
        except BrokenPipeError:
            # The reader went away (`mlxdet train | head`). A training is worth more than its progress: go on without.
            self.console = Console(file=io.StringIO())

    def started(self, run: Run, step: int) -> None:
        m = run.config.model
        environment = run.manifest["environment"]
        self.say(
            f"{run.path}: {m.layers} layers, width {m.width}, context {m.context}, "
            f"{run.manifest['parameters']:,} parameters, {m.dtype}\n"
            f"{_read(run)}\n"
            f"device: {environment['decides']['device']}, mlx {environment['decides']['mlx']}, "
            f"{run.config.loop.kernels} kernels, seed {run.config.seeds.seed}"
        )
        if not run.manifest.get("audit", {"ok": True})["ok"]:
            racing = sorted({f["primitive"] for f in run.manifest["audit"]["findings"]}) or ["operations not audited"]
            self.say(f"audit: this step can give different bits on this device ({', '.join(racing)}); `mlxdet audit`")
        if step == self.steps:
            self.say(f"already done: all {step} steps are trained")
        elif step:
            self.say(f"resumed after step {step}")
        self.began, self.first = time.monotonic(), step

    def left(self, step: int) -> float:
        """Return the seconds left, from the mean speed so far."""
        return (time.monotonic() - self.began) / max(1, step - self.first) * (self.steps - step)

    def stepped(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        step = record["step"]
        if step % self.config.loop.log_every == 0 or step in (self.first + 1, self.steps):
            self.say(
                f"step {step}/{self.steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
                f"{rate(timing['tokens_per_s'])}  {memory(timing)}  left {duration(self.left(step))}"
            )

    def validated(self, step: int, loss: float) -> None:
        self.say(f"step {step}/{self.steps}  validation loss {loss:.4f}")

    def sampled(self, step: int, text: str) -> None:
        self.say(f"step {step}/{self.steps}  sample: {text!r}")

    def saved(self, step: int, path: Path) -> None:
        self.say(f"step {step}/{self.steps}  saved {path}")

    def spiked(self, spike: Spike, action: str) -> None:
        grad = f", gradient norm {spike.grad_norm:.4g}" if spike.grad_norm is not None else ""
        what = {"warn": "", "skip": "; its update is skipped", "stop": "; stopping",
                "rollback": "; rolling back"}[action]  # fmt: skip
        self.say(f"step {spike.step}/{self.steps}  spike: loss {spike.loss:.4f}{grad}: {spike.text()}{what}")

    def stopped(self, run: Run, step: int, reason: str) -> None:
        losses = [record["loss"] for record in run.records(METRICS) if record["step"] <= step]
        if losses:
            line = sparkline(losses)
            encoding = getattr(self.console.file, "encoding", None) or "ascii"
            if line.encode(encoding, "ignore").decode(encoding) == line:
                self.say(f"loss {losses[0]:.3f} {line} {losses[-1]:.3f}")

    def close(self) -> None:
        pass


class Bar(Lines):
    """Progress as a live bar, with the lines above it."""

    def __init__(self, console: Console, config: TrainConfig):
        super().__init__(console, config)
        self.bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[memory]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.task: TaskID | None = None

    def started(self, run: Run, step: int) -> None:
        super().started(run, step)
        self.task = self.bar.add_task("", total=self.steps, completed=step, loss="-", rate="-", memory="-")
        self.bar.start()

    def stepped(self, record: dict[str, Any], timing: dict[str, Any]) -> None:
        assert self.task is not None
        self.bar.update(
            self.task, completed=record["step"], loss=f"{record['loss']:.4f}", rate=rate(timing["tokens_per_s"]),
            memory=memory(timing),
        )  # fmt: skip

    def stopped(self, run: Run, step: int, reason: str) -> None:
        self.bar.stop()
        super().stopped(run, step, reason)

    def close(self) -> None:
        self.bar.stop()
