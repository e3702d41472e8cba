"""Definition of AdamW in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

SCALARS = ("scale", "learning_rate", "weight_decay", "b1", "b2", "eps", "rest1", "rest2", "run")
"""Scalars that all leaves share, float32; ``rest1``, ``rest2`` are :math:`1 - \\beta_i^t`."""


def root(x: Any) -> Any:
    """Computes the square root."""
    return jnp.sqrt(x)


def update(
    scalars: Sequence[Any], arrays: Sequence[Any], decoupled: bool, root: Any = root
) -> list[Any]:
    """Computes the formula of :func:`pallas_kernels.fused_adamw`, for any slice of a leaf.

    Args:
      scalars: see :data:`SCALARS`.
      arrays: gradient, parameter and moments.
      decoupled: see :func:`pallas_kernels.fused_adamw`.
      root: the square root function.

    Returns:
      Parameter and moments after the update, float32.
    """
    scale, rate, decay, b1, b2, eps, rest1, rest2, run = scalars
    g, p, mu, nu = (x.astype(jnp.float32) for x in arrays)
    g = g * scale
    if not decoupled:
        g = g + decay * p
    mu_after = b1 * mu + (1 - b1) * g
    nu_after = b2 * nu + (1 - b2) * (g * g)
    step = (mu_after / rest1) / (root(nu_after / rest2) + eps)
    if decoupled:
        step = step + decay * p
    updated = [p - rate * step, mu_after, nu_after]
    is_applied = jnp.full(p.shape, run) != 0  # kernels cannot select by a scalar
    return [jnp.where(is_applied, x, old) for x, old in zip(updated, (p, mu, nu), strict=True)]
