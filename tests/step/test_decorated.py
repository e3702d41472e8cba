"""A decorated function is called, and looks, as its author wrote it."""

import inspect
from typing import Any

import pytest
from flax.training.train_state import TrainState

import zerojax


def function(state: TrainState, batch: Any, *, flag: bool = False) -> tuple[TrainState, Any]:
    """Trains."""
    return state, flag


@pytest.mark.parametrize("decorate", [lambda zero: zero, lambda zero: zero.evaluate])
def test_keeps_signature_and_name(decorate: Any) -> None:
    decorated = decorate(zerojax.zero(stage=0))(function)
    assert inspect.signature(decorated) == inspect.signature(function)
    assert decorated.__name__ == "function"
    assert decorated.__doc__ == "Trains."
    assert decorated.__wrapped__ is function


def test_a_method_is_bound_once_an_instance() -> None:
    zero = zerojax.zero(stage=0)

    class Trainer:
        @zero
        def step(self, state: TrainState, batch: Any) -> TrainState:
            return state

        @zero.evaluate
        def score(self, state: TrainState, batch: Any) -> Any:
            return batch

    one, other = Trainer(), Trainer()
    assert one.step is one.step
    assert one.score is one.score
    assert one.step is not other.step
    assert type(one.step) is type(Trainer.step)
