"""The global norm of a gradient, summed in an order that does not depend on where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def square_sums(x: jax.Array) -> jax.Array:
    """Square sums of the rows of ``x``, its entries along the first dimension.

    A stack of layers gives the same numbers as its layers one by one.
    """
    squares = jnp.square(jnp.abs(x))
    return jnp.sum(squares, axis=tuple(range(1, x.ndim))) if x.ndim > 1 else squares


def global_norm(tree: Any) -> jax.Array:
    """The L2 norm over all leaves."""
    return norm_of([square_sums(x) for x in jax.tree.leaves(tree)])


def norm_of(sums: Sequence[jax.Array]) -> jax.Array:
    """The same from the :func:`square_sums` of the leaves."""
    return jnp.sqrt(sum((jnp.sum(x) for x in sums), start=jnp.zeros((), jnp.float32)))
