"""Casts with a range check."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Casts an array to another float dtype; returns the array itself if it has that dtype.

    Raises:
      ValueError: A finite number is beyond the dtype's range.
    """
    if block.dtype == dtype:
        return block
    result, overflowed = narrowed(block, dtype)
    if overflowed.any():
        raise ValueError(
            f"{name} holds {float(block[overflowed][0]):g}, and {dtype.name} ends at "
            f"{float(jnp.finfo(dtype).max):g}: choose another dtype"
        )
    return result


def narrowed(values: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Casts floats to floats or integers to integers; returns the result, and for each number
    whether it is beyond the dtype's range."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
    if jnp.issubdtype(values.dtype, jnp.integer):
        return result, (result.astype(values.dtype) != values) | ((result < 0) != (values < 0))
    if jnp.finfo(dtype).max < jnp.finfo(values.dtype).max:
        return result, np.isinf(result) & np.isfinite(values)
    return result, np.zeros((), np.bool_)
