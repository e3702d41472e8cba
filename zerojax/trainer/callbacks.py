"""Callbacks, as in Hugging Face's Trainer: what happens besides, and when a run stops."""

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
    """How far a run has come; saved in every checkpoint.

    Attributes:
      global_step: Updates made.
      max_steps: Updates of the run.
      epoch: Epochs done, with the fraction.
      log_history: Every log, oldest first.
      best_metric: The best value of ``metric_for_best_model`` so far.
      best_global_step: The update at which it was reached.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None

    def improve(self, metrics: Mapping[str, float], args: TrainingArguments) -> None:
        """Takes note of an evaluation, if it is the best."""
        value, best = metrics.get(args.metric_for_best_model, math.nan), self.best_metric
        better = operator.gt if args.greater_is_better else operator.lt
        if not math.isnan(value) and (best is None or better(value, best)):
            self.best_metric, self.best_global_step = value, self.global_step


@dataclass
class TrainerControl:
    """What a callback may ask for, by setting a flag: in several processes in all of them."""

    should_training_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


class TrainerCallback:
    """The base of callbacks; methods get ``metrics=`` or ``logs=`` where there are any.

    Example:
      >>> class Stop(TrainerCallback):
      ...     def on_step_end(self, args, state, control, **kwargs):
      ...         control.should_training_stop = state.global_step >= 100
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step of an epoch."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a step."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an evaluation, with ``metrics``."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a prediction, with ``metrics``."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint was begun."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a log, with ``logs``."""


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class EarlyStoppingCallback(TrainerCallback):
    """Stops after so many evaluations in a row without a better ``metric_for_best_model``.

    Args:
      early_stopping_patience: Evaluations.
      early_stopping_threshold: By how much a better value must be better.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0
    ) -> None:
        self._patience, self._threshold = early_stopping_patience, early_stopping_threshold

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that there are evaluations."""
        if args.eval_strategy == "no":
            raise ValueError('EarlyStoppingCallback needs eval_strategy="steps" or "epoch"')

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts evaluations since the best one, from the history, which checkpoints have."""
        name, sign = args.metric_for_best_model, 1 if args.greater_is_better else -1
        if "eval_runtime" in kwargs["metrics"]:  # not of another prefix, such as eval_other
            check_metric(name, kwargs["metrics"])
        values = [sign * log[name] for log in state.log_history if name in log]
        best, waited = -float("inf"), 0
        for value in values:
            waited = 0 if value > best + self._threshold else waited + 1
            best = value if not waited else best
        control.should_training_stop |= waited >= self._patience


def check_metric(name: str, metrics: Mapping[str, Any]) -> None:
    """Whether evaluations give the metric that decides.

    Raises:
      ValueError: They do not.
    """
    if name not in metrics:
        raise ValueError(
            f'metric_for_best_model is "{name}", and an evaluation gives {", ".join(metrics)}: '
            "name one of these, or return it from compute_metrics"
        )


class Callbacks:
    """The callbacks of a run.

    Args:
      given: Callbacks, or classes of them.

    Raises:
      TypeError: One is no TrainerCallback, or has a method for an event that does not exist.
    """

    def __init__(self, given: Iterable[Any], args: TrainingArguments) -> None:
        self._args = args
        self._all = [each() if isinstance(each, type) else each for each in given]
        for each in self._all:
            if not isinstance(each, TrainerCallback):
                raise TypeError(
                    f"callbacks: {each!r} is no callback; derive its class from "
                    "zerojax.trainer.TrainerCallback"
                )
            for name in dir(each):
                if name.startswith("on_") and name not in EVENTS:
                    raise TypeError(
                        f"callbacks: {type(each).__name__}.{name} would never be called; "
                        f"{suggestion(name, EVENTS)}"
                    )

    def __call__(
        self, event: str, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for each in self._all:
            getattr(each, event)(self._args, state, control, **kwargs)


def due(args: TrainingArguments, state: TrainerState, control: TrainerControl, epoch: int) -> None:
    """Asks for what the arguments want after an update, beside what callbacks asked for.

    Args:
      args: The run.
      state: How far it has come.
      control: Takes the wishes.
      epoch: Updates of an epoch.
    """
    step, last = state.global_step, state.global_step >= state.max_steps

    def now(event: str) -> bool:
        every = args.every(event, state.max_steps, epoch)
        by_epoch = getattr(args, f"{event}_strategy") == "epoch"
        return bool(every) and (step % every == 0 or (last and by_epoch))

    waited = state.epoch if args.eval_strategy == "epoch" else step
    control.should_training_stop |= last
    control.should_log |= now("logging") or (step == 1 and args.logging_first_step)
    control.should_evaluate |= now("eval") and waited >= args.eval_delay
    control.should_save |= now("save") or (last and args.save_strategy != "no")
    # The best checkpoint is the best by its own evaluation.
    control.should_evaluate |= control.should_save and args.load_best_model_at_end


def saved(state: TrainerState) -> dict[str, Any]:
    """The state as JSON."""
    return dataclasses.asdict(state)
