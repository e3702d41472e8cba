"""The batch of an evaluation: any number of rows, divided into micro-batches on the devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.step.batch import put

Entry = tuple[str, ...] | None
"""The axes that cut one dimension."""


class Division(NamedTuple):
    """A batch in micro-batches of equal size, the last rows of which may be copies.

    Attributes:
      rows: Rows of the batch.
      times: Number of micro-batches.
      each: Rows of one device in a micro-batch.
      devices: Number of devices that share the rows.
    """

    rows: int
    times: int
    each: int
    devices: int

    @classmethod
    def of(cls, rows: int, micro: int | None, devices: int) -> Division | None:
        """The fewest micro-batches of at most ``micro`` rows a device; None where the batch is one,
        and its rows divide among the devices.

        Example:
          >>> Division.of(20, 1, 8)
          Division(rows=20, times=3, each=1, devices=8)
        """
        times = 1 if micro is None else -(-rows // (micro * devices))
        each = -(-rows // (times * devices))
        division = cls(rows, times, each, devices)
        return None if times == 1 and division.padded == rows else division

    @property
    def part(self) -> int:
        """Rows of a micro-batch."""
        return self.each * self.devices

    @property
    def padded(self) -> int:
        """Rows of all micro-batches."""
        return self.times * self.part


def rows_of(batch: Any) -> int | None:
    """The leading dimension of all arrays of a batch; None where they have several.

    Raises:
      ValueError: The batch has no rows.
    """
    found = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if not found or 0 in found:
        raise ValueError(
            "the batch is empty: "
            + ("its leading dimension is 0." if found else "it has no array with rows.")
        )
    return found.pop() if len(found) == 1 else None


class BatchPlacer:
    """Lays batches over the devices.

    Args:
      mesh: The devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axes, self.devices = mesh, batch_axes(mesh), batch_devices(mesh)
        self._by_row, self._replicated = self._of(self._axes), self._of()

    def _of(self, *entries: Entry) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        even = bool(shape) and shape[0] % self.devices == 0
        return self._by_row if even else self._replicated

    def place(self, batch: Any, division: Division | None) -> Any:
        """Puts a batch on the devices: a divided one filled up with copies of its last row, of
        another one the arrays whose rows do not divide on every device."""

        def filled(x: Any) -> jax.Array:
            if division is not None and np.ndim(x) and division.padded != division.rows:
                x = x[np.minimum(np.arange(division.padded), division.rows - 1)]
            return put(x, self._sharding(np.shape(x)))

        return jax.tree.map(filled, batch)

    def abstract(self, batch: Any, division: Division | None) -> Any:
        """Shapes, dtypes and shardings of a batch on the devices."""

        def like(x: Any) -> jax.ShapeDtypeStruct:
            shape = tuple(np.shape(x))
            shape = (division.padded, *shape[1:]) if division is not None and shape else shape
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=self._sharding(shape))

        return jax.tree.map(like, batch)

    def _constrained(self, x: jax.Array, *entries: Entry) -> jax.Array:
        return lax.with_sharding_constraint(x, self._of(*entries))

    def micro_batches(self, x: jax.Array, division: Division) -> jax.Array:
        """``[padded, ...]`` as ``[times, part, ...]``, each device with rows that it has."""
        x = x.reshape(division.devices, division.times, division.each, *x.shape[1:])
        x = jnp.swapaxes(self._constrained(x, self._axes), 0, 1)
        x = x.reshape(division.times, division.part, *x.shape[3:])
        return self._constrained(x, None, self._axes)

    def rows(self, x: jax.Array, division: Division) -> jax.Array:
        """The way back, ``[times, part, ...]`` as ``[rows, ...]``."""
        x = x.reshape(division.times, division.devices, division.each, *x.shape[2:])
        x = jnp.swapaxes(self._constrained(x, None, self._axes), 0, 1)
        x = self._constrained(x.reshape(division.padded, *x.shape[3:]), self._axes)
        return x if division.padded == division.rows else x[: division.rows]
