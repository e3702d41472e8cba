"""A gradient summed over the devices, or group by group, is the gradient."""

from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from zerojax.collectives import gradients
from zerojax.graph.rows import RowDimensions, whole
from zerojax.xla import jaxprs

TABLE = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(12, size=(8, 3))


def scattered(lookup: Callable[[Any], Any]) -> tuple[Any, list[jax.Array], jax.Array]:
    """The equation that adds up the gradient of a lookup, its operands and its result."""
    closed = jax.make_jaxpr(jax.grad(lambda table: jnp.sum(lookup(table) ** 2)))(TABLE)
    found: list[Any] = []

    def run(eqn: Any, values: list[Any]) -> Any:
        outs = jaxprs.bind(eqn, values)
        if eqn.primitive.name == "scatter-add":
            found.append((eqn, values, outs[0]))
        return outs

    jaxprs.evaluate(closed, [TABLE], run)
    (only,) = found
    return only


@pytest.mark.parametrize(
    "lookup",
    [
        lambda table: jnp.take(table, TOKENS, axis=0),
        lambda table: table[TOKENS],
        lambda table: table.T[:, TOKENS],  # the window's dimension first
    ],
)
def test_the_parts_of_the_groups_add_up(lookup: Callable[[Any], Any]) -> None:
    eqn, values, want = scattered(lookup)
    rows = RowDimensions(lambda: {eqn.invars[1]: whole(eqn.invars[1].aval.shape, [0])})
    assert gradients.can_split(eqn, rows, 4)
    assert not gradients.can_split(eqn, rows, 3)  # of 8 rows
    parts = gradients.by_group(eqn, values, 4)
    assert parts.shape == (4, *want.shape)
    np.testing.assert_allclose(values[0] + parts.sum(0), want, rtol=1e-6)


def test_a_lookup_without_rows_is_left_alone() -> None:
    eqn, _, _ = scattered(lambda table: table[np.arange(8)])
    assert not gradients.can_split(eqn, RowDimensions(), 2)


def without_first(grads: Any) -> Any:
    return {"w": grads["w"].at[0].set(0.0)}


@jax.jit
def doubled_last(grads: Any) -> Any:
    return {"w": grads["w"].at[-1].multiply(2.0)}


@pytest.mark.parametrize(("change", "in_optimizer"), [(without_first, False), (doubled_last, True)])
def test_a_step_that_changes_one_row_of_a_gradient(
    change: Callable[[Any], Any], in_optimizer: bool
) -> None:
    """As for the embedding of padding tokens."""
    x, w = np.random.default_rng(2).normal(size=(2, 16, 16)).astype(np.float32)
    tx = optax.chain(optax.stateless(lambda updates, _: change(updates)), optax.sgd(1.0))

    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads if in_optimizer else change(grads)), value

    def create() -> TrainState:
        used = tx if in_optimizer else optax.sgd(1.0)
        return TrainState.create(apply_fn=None, params={"w": jnp.asarray(w)}, tx=used)

    assert zerojax.zero(stage=2).plan(create()).params["w"] == PartitionSpec("data")
    emitted.check(emitted.Source(create, train_step, (x,), rows=len(x)), 2)
