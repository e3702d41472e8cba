"""Events of callbacks: those of transformers that run, and those that cannot."""

from typing import Any

import pytest

from zerojax import TrainingArguments
from zerojax.trainer import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from zerojax.trainer.callbacks import UNSUPPORTED_EVENTS, Callbacks, due

ARGS = TrainingArguments("out", eval_strategy="steps", eval_steps=4, eval_delay=2)


@pytest.mark.parametrize("event", UNSUPPORTED_EVENTS)
def test_an_event_that_cannot_run_is_refused(event: str) -> None:
    callback = type("Mine", (TrainerCallback,), {event: lambda *args, **kwargs: None})
    with pytest.raises(TypeError, match=f"Mine.{event} would never be called; .* use |: read "):
        Callbacks([callback], ARGS)


class Stop(TrainerCallback):
    """Returns new flags, as callbacks of transformers may do."""

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        assert kwargs == {"model": "the model"}
        return TrainerControl(should_training_stop=True)


def test_returned_flags_count_and_unknown_flags_do_not_pass() -> None:
    control = TrainerControl(should_log=True)
    Callbacks([Stop], ARGS, model="the model")("on_step_end", TrainerState(), control)
    assert control == TrainerControl(should_training_stop=True)
    with pytest.raises(AttributeError, match="should_epoch_stop"):
        control.should_epoch_stop = True  # type: ignore[attr-defined]


def test_the_last_step_is_evaluated_by_steps_too() -> None:
    evaluated: list[int] = []
    for step in range(1, 11):
        control = TrainerControl()
        due(ARGS, TrainerState(global_step=step, max_steps=10), control, "steps")
        evaluated += [step] * control.should_evaluate
    assert evaluated == [4, 8, 10]


def test_the_first_of_equal_metrics_is_the_best() -> None:
    state, improved = TrainerState(), []
    for step, value in enumerate([3.0, float("nan"), 2.0, 2.0, 1.0]):
        state.global_step = step
        improved.append(state.improve({"eval_loss": value}, ARGS))
    assert improved == [True, False, True, False, True]
    assert (state.best_metric, state.best_global_step) == (1.0, 4)
    assert state.is_world_process_zero


def test_early_stopping_counts_from_the_best_so_far() -> None:
    """Small improvements raise the bar, and the evaluation before training does not count."""
    stop, control = EarlyStoppingCallback(2, 0.5), TrainerControl()
    losses = [0.1, 3.0, 2.7, 2.4]
    history = [{"eval_loss": loss, "step": step} for step, loss in enumerate(losses)]
    for n, stops in ((3, False), (4, True)):
        state = TrainerState(log_history=history[:n])
        stop.on_evaluate(ARGS, state, control, metrics={"eval_loss": 1.0})
        assert control.should_training_stop is stops
