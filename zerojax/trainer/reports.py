"""Reports of a run: its log, for callbacks, the config's monitors and the screen."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax
from jax.sharding import Mesh

from zerojax.optim.telemetry import telemetry
from zerojax.step.train_step import Step
from zerojax.trainer import picture
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import Callbacks, TrainerControl, TrainerState
from zerojax.trainer.screen import Screen
from zerojax.xla.types import PyTree, Shaped


class Progress:
    """Losses, rows and times of a call of ``train``.

    Attributes:
      losses: The losses since the last log, transferred to the host when they are logged.
    """

    losses: list[float | jax.Array]

    def __init__(self) -> None:
        self.losses, self._sum, self._count = [], 0.0, 0
        self._start, self._mark = time.perf_counter(), cast("float | None", None)
        self._rows, self._timed_rows, self._timed_tokens, self._timed = 0, 0, 0, 0.0

    def advance(self, rows: int, batch: Mapping[str, Shaped], loss: jax.Array) -> None:
        """Counts an update that was dispatched; waits for the one before, so that at most one is in
        flight.

        Args:
          rows: The rows of all processes.
          batch: The batch.
          loss: The loss [].
        """
        jax.block_until_ready(self.losses[-1:])
        self.losses.append(loss)
        now, self._rows = time.perf_counter(), self._rows + rows
        if self._mark is not None:  # the first update compiles, and is not timed
            shape = batch["input_ids"].shape[1:] if "input_ids" in batch else (0,)
            self._timed, self._timed_rows = self._timed + now - self._mark, self._timed_rows + rows
            self._timed_tokens += rows * math.prod(shape)
        self._mark = now

    def restart(self) -> None:
        """Excludes the time since the last update, for example that of an evaluation."""
        self._mark = self._mark and time.perf_counter()

    def take(self) -> float:
        """Returns the mean loss since the last log, and starts the next interval."""
        values = [*map(float, self.losses)]
        self._sum, self._count = self._sum + sum(values), self._count + len(values)
        self.losses.clear()
        return sum(values) / len(values) if values else math.nan

    def figures(self, steps: int) -> dict[str, float]:
        """Returns the figures of the call, in which ``steps`` updates were made."""
        self.take()
        seconds = time.perf_counter() - self._start
        return {
            "train_loss": self._sum / self._count if self._count else math.nan,
            "train_runtime": seconds,
            "train_samples_per_second": self._rows / seconds,
            "train_steps_per_second": steps / seconds,
        }

    def speed(self) -> str:
        """Returns the tokens or rows per second of the updates that were timed; empty if none."""
        tokens, rows = self._timed_tokens, self._timed_rows
        number, unit = (tokens, "tokens/s") if tokens else (rows, "rows/s")
        return f"{number / self._timed:,.0f} {unit}" if self._timed else ""


class Reports:
    """Writes the figures of updates, of evaluations and of the end of training.

    Args:
      args: The arguments.
      callbacks: The callbacks of the run.
      step: The decorated step, which has the monitors.
      rows: Rows of an update, as monitors count samples.
      mesh: The devices.

    Attributes:
      screen: The screen of the run.
      progress: The losses and times of the last call of ``train``.
    """

    screen: Screen
    progress: Progress

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: Callbacks,
        step: Step[..., PyTree],
        rows: int,
        mesh: Mesh,
    ) -> None:
        self._args, self._callbacks, self._step = args, callbacks, step
        self._rows, self._mesh = rows, mesh
        self.screen, self.progress = Screen(bars=not args.disable_tqdm), Progress()

    def update(
        self,
        train_state: PyTree,
        state: TrainerState,
        control: TrainerControl,
        bar: Callable[..., None],
    ) -> None:
        """Logs and prints the mean loss since the last log, and the last step's figures.

        Args:
          train_state: The training state.
          state: The progress.
          control: The flags of the callbacks.
          bar: The bar of the updates, which shows the speed.
        """
        values, names = telemetry(train_state), ("grad_norm", "learning_rate")
        logs = {"loss": self.progress.take(), **{name: float(values[name]) for name in names}}
        line = f"{_done(state)}  {_text(logs)}"
        self._log(logs, state, control)
        stats = [device.memory_stats() or {} for device in self._mesh.local_devices]
        peak = max(each.get("peak_bytes_in_use", 0) for each in stats)  # CPUs report none
        memory = f"{peak / 1e6:,.1f} MB/device" if peak else ""
        pace = "  ".join(filter(None, (self.progress.speed(), memory)))
        bar(0, figures=pace)
        self.screen.print(f"{line}  {pace}".rstrip())

    def evaluation(
        self, metrics: dict[str, float], prefix: str, state: TrainerState, control: TrainerControl
    ) -> None:
        """Logs an evaluation's metrics, to which the log adds the epoch."""
        shown = {k: v for k, v in metrics.items() if not k.endswith(picture.SPEED)}
        speed = f"{metrics[f'{prefix}_samples_per_second']:,.0f} rows/s"
        self._log(metrics, state, control, "Eval")
        self.screen.print(f"{_done(state)}  {_text(shown)}  {speed}")

    def end(
        self, steps: int, checkpoint: str | None, state: TrainerState, control: TrainerControl
    ) -> dict[str, float]:
        """Logs the figures of a call of ``train``, and prints its summary, with a picture.

        Args:
          steps: The number of updates of the call.
          checkpoint: The path of the newest checkpoint, or of the best if it was loaded.
          state: The progress.
          control: The flags of the callbacks.

        Returns:
          The figures, with the epoch.
        """
        figures = self.progress.figures(steps)
        self._log(figures, state, control, "Summary")
        self._step.flush()  # an evaluation may follow, in the same run of wandb
        for line in self._summary(figures, checkpoint, state):
            self.screen.print(line)
        return figures

    def _summary(
        self, figures: Mapping[str, float], checkpoint: str | None, state: TrainerState
    ) -> Iterator[str]:
        """Yields the lines at the end of a call of ``train``."""
        time_taken, speed = duration(figures["train_runtime"]), self.progress.speed()
        yield (
            f"trained to step {state.global_step}/{state.max_steps}, epoch {state.epoch:.3g}, in "
            f"{time_taken}{speed and f', {speed}'}, mean loss {figures['train_loss']:.4g}"
        )
        if state.best_metric is not None:
            best = _text({self._args.metric_for_best_model: state.best_metric})
            yield f"best {best}, at step {state.best_global_step}"
        if checkpoint is not None:
            loaded = " (the best, loaded)" if self._args.load_best_model_at_end else ""
            yield f"checkpoint {checkpoint}{loaded}"
        drawn = picture.write(pathlib.Path(self._args.output_dir), state.log_history)
        if drawn is not None:
            yield f"picture {drawn}"

    def _log(
        self, logs: dict[str, float], state: TrainerState, control: TrainerControl, group: str = ""
    ) -> None:
        """Adds the epoch to a log, and the log to the history; its numbers go to the monitors of a
        group, as those of updates do by themselves."""
        numbers = {k: v for k, v in logs.items() if isinstance(v, int | float)}
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self._callbacks("on_log", state, control, logs=logs)
        if group:
            tags = {f"{group}/Samples/{name}": value for name, value in numbers.items()}
            self._step.write(tags, state.global_step * self._rows)


def _done(state: TrainerState) -> str:
    """Returns the start of a line, the number of updates done."""
    return f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"


def _text(logs: Mapping[str, object]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in logs.items()
    )


def duration(seconds: float) -> str:
    """Returns a time in words.

    Example:
      >>> duration(7.25), duration(61), duration(7322)
      ('7.2 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
