"""Sum of squares and finiteness of a leaf in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def of_leaf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of squares, float32 [], and whether every element is finite, bool []."""
    x = x.astype(jnp.float32)
    return jnp.sum(x * x), jnp.all(jnp.isfinite(x))
