"""Dropout of the kernels: XLA draws the mask, the same in both passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def checked(kernel: str, rate: Any, key: jax.Array | None) -> float:
    """Returns the rate after checking it.

    Raises:
      ValueError: the rate is out of range, or is not 0 and there is no key.
    """
    rate = float(rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{kernel}: dropout_rate is {rate}; it must be at least 0 and below 1")
    if rate > 0 and key is None:
        raise ValueError(f"{kernel}: dropout_rate is {rate}, so pass a dropout_key (or the rate 0)")
    return rate


def drawn(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array | None:
    """Draws the mask of kept elements, bool like x; None (all) without a key."""
    return None if key is None else jax.random.bernoulli(key, 1 - rate, x.shape)


def dropped(x: Any, kept: Any, rate: float) -> Any:
    """Returns x / (1 - rate) where ``kept``, else 0; x itself if ``kept`` is None."""
    return x if kept is None else jnp.where(kept, x * (1 / (1 - rate)), jnp.zeros(x.shape, x.dtype))
