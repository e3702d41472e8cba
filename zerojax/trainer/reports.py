"""Reports of a run: figures for its log, its callbacks, the config's monitors and the screen."""

from __future__ import annotations

import pathlib

from zerojax.optim.telemetry import telemetry
from zerojax.step.train_step import Step
from zerojax.trainer import picture
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import Callbacks, TrainerControl, TrainerState
from zerojax.trainer.progress import MeanLoss
from zerojax.trainer.screen import Screen
from zerojax.trainer.summary import evaluation_line, monitored, summary_lines
from zerojax.xla.types import PyTree


class Reports:
    """Writes the figures of updates, of evaluations and of the end of training.

    Args:
      args: The arguments.
      callbacks: The callbacks of the run.
      step: The decorated step, which has the monitors.
      rows: Rows of an update, as monitors count samples.

    Attributes:
      screen: The screen of the run.
      losses: The losses of the run.
    """

    screen: Screen
    losses: MeanLoss

    def __init__(
        self, args: TrainingArguments, callbacks: Callbacks, step: Step[..., PyTree], rows: int
    ) -> None:
        self._args, self._callbacks, self._step, self._rows = args, callbacks, step, rows
        self.screen, self.losses = Screen(bars=not args.disable_tqdm), MeanLoss()

    def update(
        self, train_state: PyTree, state: TrainerState, control: TrainerControl
    ) -> dict[str, float]:
        """Logs the mean loss since the last log, and the last step's figures; returns these."""
        values, names = telemetry(train_state), ("grad_norm", "learning_rate")
        logs = {"loss": self.losses.take(), **{name: float(values[name]) for name in names}}
        self._log({**logs}, state, control)
        return logs

    def evaluation(
        self, metrics: dict[str, float], prefix: str, state: TrainerState, control: TrainerControl
    ) -> None:
        """Logs an evaluation's metrics, to which the log adds the epoch."""
        self._log(metrics, state, control)
        self._step.write(monitored(metrics, "Eval"), state.global_step * self._rows)
        self.screen.print(evaluation_line(metrics, prefix, state))

    def end(
        self,
        figures: dict[str, float],
        speed: str,
        checkpoint: str | None,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        """Logs the figures of a call of ``train``, and prints its summary, with a picture.

        Args:
          figures: The figures, to which the log adds the epoch.
          speed, checkpoint: As for :func:`zerojax.trainer.summary.summary_lines`.
          state: The progress.
          control: The flags of the callbacks.
        """
        self._log(figures, state, control)
        self._step.write(monitored(figures, "Summary"), state.global_step * self._rows)
        self._step.flush()  # an evaluation may follow, in the same run of wandb
        for line in summary_lines(figures, speed, checkpoint, state, self._args):
            self.screen.print(line)
        drawn = picture.write(pathlib.Path(self._args.output_dir), state.log_history)
        if drawn is not None:
            self.screen.print(f"picture {drawn}")

    def _log(self, logs: dict[str, float], state: TrainerState, control: TrainerControl) -> None:
        """Adds the epoch to a log, and the log to the history."""
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self._callbacks("on_log", state, control, logs=logs)
