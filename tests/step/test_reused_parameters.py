"""Parameters that a pass uses several times: gathered once in each pass, by the decisions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

WIDTH, ROWS, WORDS = 256, 4096, 2048
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "table": (WORDS, WIDTH)}

Model = Callable[[Any, jax.Array], jax.Array]


def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def repeated(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = block(p, x)
    return x


def rematerialised(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jax.checkpoint(block)(p, x)
    return x


def cast(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        x = block(low, x.astype(jnp.bfloat16))
    return x


def exits(p: Any, x: jax.Array) -> jax.Array:
    x, outs = block(p, x), []
    for _ in range(4):
        x = jnp.tanh(x)
        outs.append(x @ p["table"].T)
    return jnp.stack(outs)


def tied(p: Any, x: jax.Array) -> jax.Array:
    return block(p, p["table"][jnp.argmax(x, -1)]) @ p["table"].T


def gathers(model: Model) -> dict[str, int]:
    """The number of gathers of each parameter in a step."""

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(model(params, batch).astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def create_state() -> TrainState:
        params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    zero = zerojax.zero(stage=3)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    rows = zero(train_step).collectives(zero.abstract_state(create_state), batch).rows
    found = {name: 0 for name in SHAPES}
    for row in rows:
        if row.kind == "all-gather":
            for array in row.arrays:
                found[array.split("'")[1]] += row.times
    return {name: n for name, n in found.items() if n}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (repeated, {"up": 2, "down": 2}),
        (rematerialised, {"up": 2, "down": 2}),
        (cast, {"up": 2, "down": 2}),
        (exits, {"up": 1, "down": 2, "table": 2}),
        (tied, {"up": 2, "down": 2, "table": 2}),
    ],
)
def test_each_pass_gathers_a_parameter_once(model: Model, expected: dict[str, int]) -> None:
    assert gathers(model) == expected
