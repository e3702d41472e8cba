"""A model of two large matrices a layer, in a loop or layer after layer, for absent GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def lowered(
    zero: zerojax.Zero, width: int, layers: int, rows: int, *, scan: bool = False
) -> jax.stages.Lowered:
    """A step; a layer has 8 ``width``² parameters."""
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}

    def create() -> TrainState:
        params: Any = [
            {name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(layers)
        ]
        if scan:
            params = {name: jnp.zeros((layers, *shape)) for name, shape in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def run(params: Any, x: jax.Array) -> jax.Array:
        block = jax.checkpoint(layer, prevent_cse=not scan)
        if scan:
            return jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0]
        return functools.reduce(block, params, x)

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(run(params, x).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    batch = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return zero(step).lower(zero.abstract_state(create), batch)
