"""A model of two large matrices a layer, layer after layer, for absent GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax


@jax.checkpoint
def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def lowered(zero: zerojax.Zero, width: int, layers: int, rows: int) -> jax.stages.Lowered:
    """A step; a layer has 8 ``width``² parameters."""
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}

    def create() -> TrainState:
        params = [{name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(layers)]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(functools.reduce(layer, params, x).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    batch = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return zero(step).lower(zero.abstract_state(create), batch)
