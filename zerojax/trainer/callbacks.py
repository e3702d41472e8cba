"""Callbacks, as in Hugging Face's Trainer: hooks into the training loop that may also stop it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zerojax.config.errors import suggestion
from zerojax.trainer.arguments import TrainingArguments


@dataclass
class TrainerState:
    """Progress of a run; saved in every checkpoint.

    Attributes:
      global_step: Updates done.
      max_steps: Updates of the run.
      epoch: Epochs done, as a fraction.
      log_history: Every log, oldest first.
      best_metric: The best value of ``metric_for_best_model`` so far.
      best_global_step: The number of updates at which ``best_metric`` was reached.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None

    def improve(self, metrics: Mapping[str, float], args: TrainingArguments) -> None:
        """Records an evaluation's metric if it is the best so far."""
        value, best = metrics.get(args.metric_for_best_model, math.nan), self.best_metric
        better = operator.gt if args.greater_is_better else operator.lt
        if not math.isnan(value) and (best is None or better(value, best)):
            self.best_metric, self.best_global_step = value, self.global_step


@dataclass
class TrainerControl:
    """Flags by which callbacks request actions; every process must set the same flags."""

    should_training_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class TrainerCallback:
    """Base class of callbacks; its methods receive ``metrics=`` or ``logs=`` if there are any.

    Example:
      >>> class Stop(TrainerCallback):
      ...     def on_step_end(self, args, state, control, **kwargs):
      ...         control.should_training_stop = state.global_step >= 100
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs before the first step."""

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after the last step."""

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs before the first step of an epoch."""

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after the last step of an epoch."""

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs before a step."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after a step."""

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after an evaluation, with its ``metrics``."""

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after a prediction, with its ``metrics``."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after a checkpoint's save has started."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Runs after a log, with its ``logs``."""


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class EarlyStoppingCallback(TrainerCallback):
    """Stops a run after several evaluations in a row without a better ``metric_for_best_model``.

    Args:
      early_stopping_patience: The number of such evaluations.
      early_stopping_threshold: The smallest improvement that counts as better.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0
    ) -> None:
        self._patience, self._threshold = early_stopping_patience, early_stopping_threshold

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Checks that the run has evaluations."""
        if args.eval_strategy == "no":
            raise ValueError('EarlyStoppingCallback needs eval_strategy="steps" or "epoch"')

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Counts evaluations since the best one, from ``log_history``, which checkpoints store."""
        name, sign = args.metric_for_best_model, 1 if args.greater_is_better else -1
        if "eval_runtime" in kwargs["metrics"]:  # skip other prefixes, such as eval_other
            check_metric(name, kwargs["metrics"])
        values = [sign * log[name] for log in state.log_history if name in log]
        best, waited = -float("inf"), 0
        for value in values:
            waited = 0 if value > best + self._threshold else waited + 1
            best = value if not waited else best
        control.should_training_stop |= waited >= self._patience


def check_metric(name: str, metrics: Mapping[str, object]) -> None:
    """Checks that an evaluation returns ``metric_for_best_model``.

    Raises:
      ValueError: The metric is missing.
    """
    if name not in metrics:
        raise ValueError(
            f'metric_for_best_model is "{name}", and an evaluation gives {", ".join(metrics)}: '
            "name one of these, or return it from compute_metrics"
        )


class Callbacks:
    """The callbacks of a run.

    Args:
      given: Callbacks, or their classes.

    Raises:
      TypeError: A callback is not a TrainerCallback, or has a method for an event that does not
        exist.
    """

    def __init__(
        self, given: Iterable[TrainerCallback | type[TrainerCallback]], args: TrainingArguments
    ) -> None:
        self._args = args
        self._all = [callback() if isinstance(callback, type) else callback for callback in given]
        for callback in self._all:
            if not isinstance(callback, TrainerCallback):
                raise TypeError(
                    f"callbacks: {callback!r} is no callback; derive its class from "
                    "zerojax.trainer.TrainerCallback"
                )
            for name in dir(callback):
                if name.startswith("on_") and name not in EVENTS:
                    raise TypeError(
                        f"callbacks: {type(callback).__name__}.{name} would never be called; "
                        f"{suggestion(name, EVENTS)}"
                    )

    def __call__(
        self, event: str, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for callback in self._all:
            getattr(callback, event)(self._args, state, control, **kwargs)


def due(args: TrainingArguments, state: TrainerState, control: TrainerControl, epoch: int) -> None:
    """Sets the flags that the arguments call for after an update; keeps those of callbacks.

    Args:
      args: The arguments of the run.
      state: The progress of the run.
      control: The flags, changed in place.
      epoch: Updates of an epoch.
    """
    step, is_last = state.global_step, state.global_step >= state.max_steps

    def is_due(event: str) -> bool:
        interval = args.every(event, state.max_steps, epoch)
        is_by_epoch = getattr(args, f"{event}_strategy") == "epoch"
        return bool(interval) and (step % interval == 0 or (is_last and is_by_epoch))

    progress = state.epoch if args.eval_strategy == "epoch" else step
    control.should_training_stop |= is_last
    control.should_log |= is_due("logging") or (step == 1 and args.logging_first_step)
    control.should_evaluate |= is_due("eval") and progress >= args.eval_delay
    control.should_save |= is_due("save") or (is_last and args.save_strategy != "no")
    # Ranking the checkpoints requires an evaluation at each of them.
    control.should_evaluate |= control.should_save and args.load_best_model_at_end


def saved(state: TrainerState) -> dict[str, object]:
    """Returns the state as a dict for JSON."""
    return dataclasses.asdict(state)
