"""The gradient of a table that is looked up, summed in each replica group by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.xla import jaxprs


def can_split(eqn: Any, groups: int) -> bool:
    """Whether an equation adds into a table what was looked up for tokens, [rows, positions], of
    which the rows divide among the groups. A table of positions is looked up without rows."""
    if eqn.primitive.name not in ("scatter-add", "scatter_add"):
        return False
    indices = eqn.invars[1].aval
    batching = jaxprs.param(eqn, "dimension_numbers").operand_batching_dims
    return not batching and indices.ndim > 2 and indices.shape[0] % groups == 0


def by_group(eqn: Any, values: Sequence[jax.Array], groups: int) -> jax.Array:
    """What each group adds to a table: [groups, *table].

    XLA's partitioner sums a scatter over all devices at once, a product within a group first.
    """
    table, indices, updates = values
    numbers = jaxprs.param(eqn, "dimension_numbers")
    row = next(d for d in range(updates.ndim) if d not in numbers.update_window_dims)

    def split(x: jax.Array, d: int) -> jax.Array:
        return x.reshape(*x.shape[:d], groups, x.shape[d] // groups, *x.shape[d + 1 :])

    def added(indices: jax.Array, updates: jax.Array) -> jax.Array:
        return jaxprs.bind(eqn, [jnp.zeros_like(table), indices, updates])[0]

    return jax.vmap(added, in_axes=(0, row))(split(indices, 0), split(updates, row))


def total(table: jax.Array, parts: jax.Array) -> jax.Array:
    """The table and the parts of all groups, added up in the table's dtype."""
    return table + lax.reduce(parts, jnp.zeros((), parts.dtype), lax.add, (0,))
