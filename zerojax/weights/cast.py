"""Casts of floats with a range check."""

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
    with np.errstate(over="ignore", invalid="ignore"):
        result = block.astype(dtype)
    if jnp.finfo(dtype).max < jnp.finfo(block.dtype).max:
        overflowed = np.isinf(result) & np.isfinite(block)
        if overflowed.any():
            raise ValueError(
                f"{name} holds {float(block[overflowed][0]):g}, and {dtype.name} ends at "
                f"{float(jnp.finfo(dtype).max):g}: choose another dtype"
            )
    return result
