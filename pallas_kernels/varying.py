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
    every = frozenset().union(*(own for own in axes if own is not None))
    return [
        x if own is None or own == every else lax.pcast(x, tuple(every - own), to="varying")
        for x, own in zip(arrays, axes, strict=True)
    ]
