"""A decorated function is called, and looks, as its author wrote it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@pytest.mark.parametrize("kind", ["step", "step without results", "evaluation"])
def test_two_programs_at_most_are_in_flight_on_virtual_devices(kind: str) -> None:
    """XLA ends the process if one device waits 40 s behind many of them."""
    zero = zerojax.zero(stage=3)

    def step(state: TrainState, batch: Any) -> Any:
        w = state.params["w"]
        loss = jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ w), batch).sum()
        if kind == "evaluation":
            return loss
        new = state.apply_gradients(grads={"w": w + loss})
        return new if kind == "step without results" else (new, loss)

    call = (zero.evaluate if kind == "evaluation" else zero)(step)
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((512, 512))}, tx=optax.sgd(0.1))
    batch, results = np.ones((64, 512), np.float32), list[jax.Array]()
    for _ in range(8):
        out = call(state, batch)
        state = out if kind == "step without results" else state if kind == "evaluation" else out[0]
        results.append(jax.tree.leaves(out)[-1])
        assert all(x.is_deleted() or x.is_ready() for x in results[:-2])
