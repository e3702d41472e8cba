"""The global norm of a gradient, summed in an order that does not depend on its placement."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zerojax.xla.types import PyTree

NORM = "zerojax-norm"
"""The named scope in which a norm is computed."""


def square_sums(x: jax.Array) -> jax.Array:
    """Returns the sum of squares of each entry of ``x``, [n, ...], along the first dimension: [n].

    A stack of layers has the same numbers as its layers one by one.
    """
    squares = jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x)
    return jnp.sum(squares, axis=tuple(range(1, x.ndim))) if x.ndim > 1 else squares


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the L2 norm over all leaves of a tree: float32 []."""
    return norm_of([square_sums(x) for x in jax.tree.leaves(tree)])


def norm_of(sums: Sequence[jax.Array]) -> jax.Array:
    """Returns the L2 norm from the :func:`square_sums` of all leaves: float32 []."""
    with jax.named_scope(NORM):
        return jnp.sqrt(sum((jnp.sum(x) for x in sums), start=jnp.zeros((), jnp.float32)))
