"""Stacks of layers that a step takes apart by itself, without ``nn.scan``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from programs.program import SGD, WIDTH, Program, vectors

LAYERS = 4


def create(key: jax.Array) -> TrainState:
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(down, (LAYERS, 2 * WIDTH, WIDTH)) / 4,
        "bias": jnp.zeros((LAYERS, WIDTH)),
    }
    return TrainState.create(apply_fn=None, params=params, tx=SGD)


@jax.checkpoint
def layer(x: jax.Array, w: Any) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"]


def of(params: Any, i: Any) -> Any:
    """One layer, or a part of the stack."""
    return jax.tree.map(lambda w: w[i], params)


def by_index(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = layer(x, of(params, i))
    return x


def by_lookup(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w: jnp.take(w, i, axis=0), params))  # noqa: B023
    return x


def shared_by_index(params: Any, x: jax.Array) -> jax.Array:
    """A layer twice, and the stack itself in a penalty."""
    x = by_index(params, layer(x, of(params, 1)))
    return x + 1e-3 * jnp.sum(params["up"] ** 2)


def in_a_loop(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, of(params, i)), x)


def in_parts(params: Any, x: jax.Array) -> jax.Array:
    for part in (slice(None, 1), slice(1, None)):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, of(params, part))
    return x


def joined(params: Any, x: jax.Array) -> jax.Array:
    """Stacks that are put together, the order of layers reversed by slices."""
    both = jax.tree.map(lambda w: jnp.concatenate([w[2:], w[:2]]), params)
    return by_index(both, x)


def step(apply: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    def train_step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return train_step


PROGRAMS = (
    Program("stack_by_index", create, step(by_index), vectors),
    Program("stack_by_lookup", create, step(by_lookup), vectors),
    Program("stack_shared", create, step(shared_by_index), vectors),
    Program("stack_in_a_loop", create, step(in_a_loop), vectors),
    Program("stack_in_parts", create, step(in_parts), vectors),
    Program("stack_joined", create, step(joined), vectors),
)
