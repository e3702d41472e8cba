"""Arrays that differ between devices, and arrays that do not, within ``shard_map``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def alike(*arrays: Any) -> list[Any]:
    """Arrays, or None, that all vary over the mesh axes of ``shard_map`` that any varies over.

    So the gradient of a weight that is the same on all devices is summed over them.
    """
    axes = [None if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*(own for own in axes if own is not None))
    return [
        x if own is None or own == every else lax.pcast(x, tuple(every - own), to="varying")
        for x, own in zip(arrays, axes, strict=True)
    ]
