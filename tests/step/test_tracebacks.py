"""A mistake in the user's function ends its traceback at the user's line."""

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

BATCH = {"x": np.ones((16, 8), np.float32)}
Loss = Callable[[Any, Any], jax.Array]


def wrong_shape(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["x"] @ params["w"] @ params["w"])


def wrong_axis(params: Any, batch: Any) -> jax.Array:
    return jax.lax.pmean(jnp.mean(batch["x"] @ params["w"]), "devices")


def call(loss_fn: Loss, **config: Any) -> None:
    @zerojax.zero(**config)
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    params = {"w": jnp.ones((8, 4))}
    train_step(TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)), BATCH)


@pytest.mark.parametrize(
    "config",
    [{"stage": 0}, {"stage": 3}, {"stage": 3, "gradient_accumulation_steps": 2}],
    ids=str,
)
@pytest.mark.parametrize("loss_fn", [wrong_shape, wrong_axis])
def test_the_users_line_is_last(loss_fn: Loss, config: dict[str, Any]) -> None:
    with pytest.raises((TypeError, AttributeError, NameError)) as caught:
        call(loss_fn, **config)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-3:] == ["call", "train_step", loss_fn.__name__]
    assert caught.value.__cause__ is None
    assert "except NameError" not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_evaluate_ends_at_the_users_line() -> None:
    @zerojax.zero(stage=3).evaluate
    def predict(state: TrainState, batch: Any) -> jax.Array:
        return wrong_shape(state.params, batch)

    params = {"w": jnp.ones((8, 4))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    for call_it in predict, predict.lower:
        with pytest.raises(TypeError) as caught:
            call_it(state, BATCH)
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[1:] == ["predict", "wrong_shape"]


def test_an_error_of_init_ends_at_the_users_line() -> None:
    def create_state() -> TrainState:
        return TrainState.create(apply_fn=None, params={"w": jnp.ones(4) @ jnp.ones(3)}, tx=None)

    with pytest.raises(TypeError) as caught:
        zerojax.zero(stage=3).init(create_state)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "create_state"


def test_jax_names_the_users_step_and_its_arguments() -> None:
    def branches(params: Any, batch: Any) -> jax.Array:
        loss = jnp.mean(batch["x"] @ params["w"])
        return loss if loss > 0 else -loss

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        call(branches, stage=3)
    assert "the function train_step at " in str(caught.value)
    assert "state.params['w'] and batch['x']" in str(caught.value)


def test_an_error_of_zerojax_ends_at_the_call() -> None:
    with pytest.raises(ValueError, match="train_batch_size") as caught:
        call(wrong_shape, stage=0, train_batch_size=8)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "call"
