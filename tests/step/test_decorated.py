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


def test_slots_are_refused_by_name() -> None:
    zero = zerojax.zero(stage=0)

    class Slotted:
        __slots__ = ()

        @zero.evaluate
        def score(self, state: TrainState, batch: Any) -> Any:
            return batch

    with pytest.raises(TypeError, match="score is a step in Slotted"):
        _ = Slotted().score


def test_an_update_in_a_block_made_under_remat3() -> None:
    """The flag is read where the block is made, and may be off again where the step is traced."""
    params = {"w": jnp.ones(8)}
    jax.config.update("jax_remat3", True)
    try:
        block = jax.checkpoint(lambda w, x: jnp.sin(w * x))
        update = jax.checkpoint(lambda state, grads: state.apply_gradients(grads=grads))
    finally:
        jax.config.update("jax_remat3", False)

    def step(state: TrainState, batch: Any) -> Any:
        grads = jax.grad(lambda p: block(p["w"], batch).mean())(state.params)
        return state.apply_gradients(grads=grads), 0

    def within(state: TrainState, batch: Any) -> Any:
        return update(state, {"w": batch}), 0

    for each in (step, within):
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        plain, _ = jax.jit(each)(state, jnp.arange(8.0))
        mine, _ = zerojax.zero(stage=3)(each)(state, jnp.arange(8.0))
        np.testing.assert_allclose(mine.params["w"], plain.params["w"], rtol=1e-6)
