"""Callbacks, as in Hugging Face's Trainer: hooks into the training loop that may also stop it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

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
      best_model_checkpoint: The folder of the newest checkpoint that was the best when it was
        saved.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None

    @property
    def is_world_process_zero(self) -> bool:
        """True in the first process of the run."""
        return jax.process_index() == 0

    def improve(self, metrics: Mapping[str, float], args: TrainingArguments) -> bool:
        """Records an evaluation's metric if it is the best so far; returns whether it is.

        The first of equal metrics is the best, and NaN never is.
        """
        value, best = metrics.get(args.metric_for_best_model, math.nan), self.best_metric
        better = operator.gt if args.greater_is_better else operator.lt
        if math.isnan(value) or not (best is None or better(value, best)):
            return False
        self.best_metric, self.best_global_step = value, self.global_step
        return True


@dataclass(slots=True)
class TrainerControl:
    """Flags by which callbacks request actions; every process must set the same flags."""

    should_training_stop: bool = False
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False


Hook = Callable[..., "TrainerControl | None"]
"""A method of a callback: ``(args, state, control, **kwargs)``."""


def _hook(text: str) -> Hook:
    """Returns a method that does nothing, with its documentation."""

    def hook(
        self: object,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Does nothing."""

    hook.__doc__ = text
    return hook


class TrainerCallback:
    """Base class of callbacks; its methods receive ``metrics=`` or ``logs=`` if there are any.

    A method changes ``control`` in place, or returns the flags to set. All methods receive the
    Trainer's ``model`` and ``processing_class``, too.

    Example:
      >>> class Stop(TrainerCallback):
      ...     def on_step_end(self, args, state, control, **kwargs):
      ...         control.should_training_stop = state.global_step >= 100
    """

    on_init_end: Hook = _hook("Runs at the end of the Trainer's initialization.")
    on_train_begin: Hook = _hook("Runs before the first step.")
    on_train_end: Hook = _hook("Runs after the last step.")
    on_epoch_begin: Hook = _hook("Runs before the first step of an epoch.")
    on_epoch_end: Hook = _hook("Runs after the last step of an epoch.")
    on_step_begin: Hook = _hook("Runs before a step.")
    on_step_end: Hook = _hook("Runs after a step.")
    on_evaluate: Hook = _hook("Runs after an evaluation, with its ``metrics``.")
    on_predict: Hook = _hook("Runs after a prediction, with its ``metrics``.")
    on_prediction_step: Hook = _hook("Runs after each batch of an evaluation or a prediction.")
    on_save: Hook = _hook("Runs after a checkpoint's save has started.")
    on_log: Hook = _hook("Runs after a log, with its ``logs``.")


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]

_ONE_PROGRAM = "an update is one compiled program, in which no Python runs: "
UNSUPPORTED_EVENTS = {
    "on_substep_end": _ONE_PROGRAM + "use on_step_end, which runs after all micro-batches",
    "on_pre_optimizer_step": _ONE_PROGRAM
    + "read grad_norm from on_log's logs, or change gradients in Trainer(optimizer=...)",
    "on_optimizer_step": _ONE_PROGRAM + "use on_step_end, which runs after the optimizer",
    "on_push_begin": "nothing is pushed to a hub: use on_save or on_train_end",
}
"""Events of transformers that zerojax does not have: the reason and the alternative."""


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
        values = [sign * log[name] for log in state.log_history if name in log and log["step"]]
        best, waited = -math.inf, 0
        for value in values:
            waited = 0 if value - best > self._threshold else waited + 1
            best = max(best, value)
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
      args: The arguments of the run.
      **objects: Further keyword arguments of every call.

    Raises:
      TypeError: A callback is not a TrainerCallback, or has a method for an event that does not
        exist, or that zerojax does not support.
    """

    def __init__(
        self,
        given: Iterable[TrainerCallback | type[TrainerCallback]],
        args: TrainingArguments,
        **objects: object,
    ) -> None:
        self._args, self._objects = args, objects
        self._all = [callback() if isinstance(callback, type) else callback for callback in given]
        for callback in self._all:
            if not isinstance(callback, TrainerCallback):
                raise TypeError(
                    f"callbacks: {callback!r} is no callback; derive it from TrainerCallback"
                )
            for name in dir(callback):
                if name.startswith("on_") and name not in EVENTS:
                    reason = UNSUPPORTED_EVENTS.get(name) or suggestion(name, EVENTS)
                    what = f"{type(callback).__name__}.{name}"
                    raise TypeError(f"callbacks: {what} would never be called; {reason}")

    def __call__(
        self, event: str, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for callback in self._all:
            call = getattr(callback, event)
            returned = call(self._args, state, control, **self._objects, **kwargs)
            if returned is not None and returned is not control:
                for flag in dataclasses.fields(control):
                    setattr(control, flag.name, getattr(returned, flag.name))


def due(
    args: TrainingArguments, state: TrainerState, control: TrainerControl, strategy: str
) -> None:
    """Sets the flags that the arguments call for; keeps those of callbacks.

    Args:
      args: The arguments of the run.
      state: The progress of the run.
      control: The flags, changed in place.
      strategy: "steps" after an update, "epoch" after the last update of an epoch or a run.
    """
    step, is_last = state.global_step, state.global_step >= state.max_steps
    by_steps = strategy == "steps"

    def is_due(event: str) -> bool:
        if getattr(args, f"{event}_strategy") != strategy:
            return False
        return not by_steps or step % args.every(event, state.max_steps, 0) == 0

    def at_end(event: str) -> bool:
        return is_last and by_steps and getattr(args, f"{event}_strategy") == strategy

    progress = step if by_steps else state.epoch
    control.should_training_stop |= is_last
    control.should_log |= is_due("logging") or (by_steps and step == 1 and args.logging_first_step)
    evaluates = is_due("eval") or at_end("eval")
    control.should_evaluate |= evaluates and progress >= args.eval_delay
    control.should_save |= is_due("save") or at_end("save")
    # Ranking the checkpoints requires an evaluation at each of them.
    control.should_evaluate |= control.should_save and args.load_best_model_at_end
