"""Gathers and scatters as lookups: where the dimensions of an array and of its windows lie."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.graph.lookups import Lookup

TABLE = jnp.arange(36.0).reshape(9, 4)
STACK = jnp.arange(72.0).reshape(2, 9, 4)
IDS = np.array([[3, 1, 4], [1, 5, 2]])


def part(x: jax.Array) -> jax.Array:
    """Rows 2 to 4, as one window."""
    numbers = lax.GatherDimensionNumbers((0, 1), (), (0,))
    return lax.gather(x, np.array([2]), numbers, (3, 4), mode="clip")


def added(x: jax.Array, indices: Any, updates: jax.Array) -> jax.Array:
    return x.at[indices].add(updates, mode="clip")


CASES: dict[str, tuple[Callable[[jax.Array], jax.Array], jax.Array, dict[str, Any]]] = {
    "rows": (
        lambda x: x.at[IDS].get(mode="clip"), TABLE,
        {"picked": (0,), "columns": (0,), "window": {1: 2}, "complete": {1}, "by_index": [0, 1]},
    ),
    "columns": (
        lambda x: x.at[:, :, IDS[0]].get(mode="clip"), STACK,
        {"picked": (2,), "columns": (2,), "window": {0: 0, 1: 1}, "complete": {0, 1},
         "by_index": [2]},
    ),
    "a part": (part, TABLE, {"columns": (0,), "window": {0: 0, 1: 1}, "complete": {1}}),
    "entries by two numbers": (
        lambda x: x.at[IDS[0], :, IDS[1]].get(mode="clip"), STACK,
        {"picked": (0, 2), "columns": (0, 2), "window": {1: 1}, "complete": {1}, "by_index": [0]},
    ),
    "rows of each table": (
        lambda x: jax.vmap(lambda x, i: x.at[i].get(mode="clip"))(x, IDS), STACK,
        {"picked": (1,), "batched": {0: 0}, "columns": (1,), "window": {2: 2}, "complete": {2},
         "by_index": [0, 1]},
    ),
    "added rows": (
        lambda x: added(x, IDS, jnp.ones((2, 3, 4))), TABLE,
        {"picked": (0,), "columns": (0,), "window": {1: 2}, "complete": {1}, "by_index": [0, 1]},
    ),
    "added parts of rows": (
        lambda x: x.at[IDS[0], :2].set(jnp.ones((3, 2))), TABLE,
        {"picked": (0,), "columns": (0, 1), "window": {1: 1}, "by_index": [0]},
    ),
    "rows added to each table": (
        lambda x: jax.vmap(added)(x, IDS, jnp.ones((2, 3, 4))), STACK,
        {"picked": (1,), "batched": {0: 0}, "columns": (1,), "window": {2: 2}, "complete": {2},
         "by_index": [0, 1]},
    ),
}  # fmt: skip
NOTHING = {"picked": (), "batched": {}, "complete": frozenset(), "by_index": []}


@pytest.mark.parametrize("name", CASES)
def test_dimensions(name: str) -> None:
    function, array, want = CASES[name]
    found = [Lookup.of(eqn) for eqn in jax.make_jaxpr(function)(array).jaxpr.eqns]
    (lookup,) = [each for each in found if each is not None]
    assert vars(lookup) == NOTHING | want
