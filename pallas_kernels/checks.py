"""Checks of the kernels' arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def floats(kernel: str, name: str, x: Any) -> jax.Array:
    """Converts x to a float array, or raises a TypeError."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{kernel}: {name} has dtype {x.dtype}; it must be of floats")
    return x


def rows(kernel: str, x: Any) -> jax.Array:
    """Converts x to floats [..., width], or raises a TypeError or ValueError."""
    x = floats(kernel, "x", x)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(
            f"{kernel}: x has shape {x.shape}; it needs at least one row of one element"
        )
    return x


def of_width(kernel: str, name: str, x: Any, width: int) -> jax.Array:
    """Converts x to floats [width], or raises a TypeError or ValueError."""
    x = floats(kernel, name, x)
    if x.shape != (width,):
        raise ValueError(f"{kernel}: {name} has shape {x.shape}, the width of x is {width}")
    return x
