"""Varying and unvarying arrays within ``shard_map``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def alike(*arrays: Any) -> list[Any]:
    """Casts arrays (or None) to vary over all mesh axes over which any of them varies.

    The cast's transpose sums the gradient of a weight that is replicated over devices.
    """
    axes = [None if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    all_axes = frozenset().union(*(array_axes for array_axes in axes if array_axes is not None))
    return [
        x
        if array_axes is None or array_axes == all_axes
        else lax.pcast(x, tuple(all_axes - array_axes), to="varying")
        for x, array_axes in zip(arrays, axes, strict=True)
    ]
