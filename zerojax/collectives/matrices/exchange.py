"""Matrices sent from the devices that hold shards of them to devices that hold some in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zerojax.plan import layout
from zerojax.plan.stored import pad

Axes = tuple[str, ...]
"""Mesh axes that shard one dimension of an array together, the outermost first."""


def axes_of(shardings: Sequence[NamedSharding]) -> list[Axes] | None:
    """Returns the axes by which devices share the matrices of these arrays, in one order for all;
    None if two dimensions, of one array or of several, share an axis in different ways."""
    found = {axes for sharding in shardings for e in sharding.spec if (axes := layout.axes(e))}
    names = [name for axes in found for name in axes]
    return sorted(found) if len(names) == len({*names}) else None


@dataclass(frozen=True)
class Exchange:
    """The exchange of arrays [count, *shape] of several parameters, in a ``jax.shard_map``.

    Attributes:
      axes: The axes over which the matrices are divided.
      shape: The shape of one matrix.
      padded: The shape with the padding that its shards need.
      sharding: The sharding of an array [*shape].
      total: The number of matrices sent, a multiple of the number of devices. Copies of the first
        matrices fill it.
    """

    axes: Sequence[Axes]
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    sharding: NamedSharding
    total: int

    def there(self, shards: Sequence[jax.Array]) -> jax.Array:
        """Returns this device's matrices, from its shards of all: by an all-to-all [total / N,
        *shape], for an array that no axis shards a slice."""
        x = jnp.concatenate(shards)
        copies = -(-self.total // len(x))
        x = jnp.concatenate([x] * copies)[: self.total] if copies > 1 else x
        for axes in self.axes:
            if (at := self._dimension(axes)) is None:
                size = len(x) // self._size(axes)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size)
            else:
                x = lax.all_to_all(x, axes, 0, at + 1, tiled=True)
        return x[:, *map(slice, self.shape)]

    def back(self, x: jax.Array) -> jax.Array:
        """Returns this device's shards of all matrices, from its matrices."""
        x = pad(x, (len(x), *self.padded))
        for axes in reversed(self.axes):
            if (at := self._dimension(axes)) is None:
                x = lax.all_gather(x, axes, tiled=True)
            else:
                x = lax.all_to_all(x, axes, at + 1, 0, tiled=True)
        return x

    def _dimension(self, axes: Axes) -> int | None:
        entries = [layout.axes(entry) for entry in self.sharding.spec]
        return entries.index(axes) if axes in entries else None

    def _size(self, axes: Axes) -> int:
        return math.prod(self.sharding.mesh.shape[name] for name in axes)
