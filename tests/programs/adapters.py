"""Low-rank updates beside a base of integers, which is not trained."""

from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from programs.program import SGD, WIDTH, Program, vectors


class BasedState(TrainState):
    """Carries the codes of a base and their scales."""

    base: Any


def create(key: jax.Array) -> BasedState:
    one, other, third = jax.random.split(key, 3)
    base = {
        "codes": jax.random.randint(one, (2, WIDTH, WIDTH), -127, 127, jnp.int8),
        "scales": jax.random.uniform(other, (2, WIDTH)) / 64,
    }
    params = {"a": jax.random.normal(third, (2, WIDTH, 2)), "b": jnp.zeros((2, 2, WIDTH))}
    return BasedState.create(apply_fn=None, params=params, base=base, tx=SGD)


def step(state: BasedState, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        x, dtype = batch["x"], batch["x"].dtype
        for i in range(2):
            w = state.base["codes"][i].astype(dtype) * state.base["scales"][i].astype(dtype)
            x = jnp.tanh(x @ w + x @ params["a"][i] @ params["b"][i])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


PROGRAMS = (Program("quantized_base", create, step, vectors, dtypes=("float64",)),)
