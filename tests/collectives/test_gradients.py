"""A gradient summed over the devices, or group by group, is the gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.collectives import gradients
from zerojax.xla import jaxprs

TABLE = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(12, size=(8, 3))


def scattered(lookup: Callable[[Any], Any]) -> tuple[Any, list[jax.Array], jax.Array]:
    """The equation that adds up the gradient of a lookup, its operands and its result."""
    closed = jax.make_jaxpr(jax.grad(lambda table: jnp.sum(lookup(table) ** 2)))(TABLE)
    found: list[Any] = []

    def run(eqn: Any, values: list[Any]) -> Any:
        outs = jaxprs.bind(eqn, values)
        if eqn.primitive.name in ("scatter-add", "scatter_add"):
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
    assert gradients.can_split(eqn, 4)
    assert not gradients.can_split(eqn, 3)  # of 8 rows
    parts = gradients.by_group(eqn, values, 4)
    assert parts.shape == (4, *want.shape)
    np.testing.assert_allclose(values[0] + parts.sum(0), want, rtol=1e-6)


def test_a_lookup_without_rows_is_left_alone() -> None:
    eqn, _, _ = scattered(lambda table: table[np.arange(8)])
    assert not gradients.can_split(eqn, 2)
