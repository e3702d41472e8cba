"""The batch of an evaluation: any number of rows, divided into micro-batches on the devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices, sequence_size
from zerojax.devices.rows import BatchRows
from zerojax.step.sequence import check_tokens, tokens_entry

Entry = tuple[str, ...] | str | None
"""Mesh axes that shard one dimension."""


class Division(NamedTuple):
    """A batch divided into micro-batches of equal size, and padded with copies of its last row.

    Attributes:
      rows: Rows of the batch.
      times: Number of micro-batches.
      each: Rows of one device in a micro-batch.
      devices: Number of devices that share the rows.
      blocks: Blocks of rows, one per process; each is padded with copies of its own last row.
    """

    rows: int
    times: int
    each: int
    devices: int
    blocks: int = 1

    @classmethod
    def of(cls, rows: int, micro: int | None, devices: int, blocks: int = 1) -> Division | None:
        """Returns the division into the fewest micro-batches of at most ``micro`` rows per device;
        None if the batch is a single micro-batch whose rows divide among the devices.

        Example:
          >>> Division.of(20, 1, 8)
          Division(rows=20, times=3, each=1, devices=8, blocks=1)
        """
        times = 1 if micro is None else -(-rows // (micro * devices))
        each = -(-rows // (times * devices))
        division = cls(rows, times, each, devices, blocks)
        return None if times == 1 and division.padded == rows else division

    @property
    def part(self) -> int:
        """Rows of a micro-batch."""
        return self.each * self.devices

    @property
    def padded(self) -> int:
        """Rows of all micro-batches."""
        return self.times * self.part

    def places(self, blocks: int) -> np.ndarray:
        """Returns the row at each place of ``blocks`` of the batch's blocks, int [padded * blocks /
        self.blocks]."""
        rows, padded = self.rows // self.blocks, self.padded // self.blocks
        block_rows = np.minimum(np.arange(padded), rows - 1)
        return np.add.outer(rows * np.arange(blocks), block_rows).reshape(-1)

    def counts(self) -> np.ndarray:
        """Returns whether each place has an original row, not a copy, bool [padded]."""
        padded = self.padded // self.blocks
        return np.arange(self.padded) % padded < self.rows // self.blocks

    def filled(self, x: Any, blocks: int | None = None) -> Any:
        """Pads ``x`` [rows, ...] with copies, for all blocks or for ``blocks`` of them."""
        return x if self.padded == self.rows else x[self.places(blocks or self.blocks)]

    def without_copies(self, x: jax.Array) -> jax.Array:
        """Removes the copies: [padded, ...] becomes [rows, ...]."""
        if self.padded == self.rows:
            return x
        x = x.reshape(self.blocks, -1, *x.shape[1:])[:, : self.rows // self.blocks]
        return x.reshape(self.rows, *x.shape[2:])


def rows_of(batch: Any) -> int | None:
    """Returns the leading dimension of all arrays of a batch; None if arrays have different ones.

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
    """Placement of batches on the devices.

    Args:
      mesh: The devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axes, self.devices = mesh, batch_axes(mesh), batch_devices(mesh)
        self._leaves = BatchRows(mesh)
        self._parts = sequence_size(mesh)

    def _of(self, *entries: Entry) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        even = bool(shape) and shape[0] % self.devices == 0
        tokens = self._tokens(shape)
        return self._of(*((self._axes if even else None,) if even or tokens else ()), *tokens)

    def _tokens(self, shape: tuple[int, ...]) -> tuple[Entry, ...]:
        """Returns the spec entry of an array's tokens, empty if the array has none.

        Raises:
          ValueError: The tokens do not divide among the devices.
        """
        if entry := tokens_entry(shape, self._parts):
            check_tokens(f"the batch's array {shape}", shape[1], self._parts)
        return entry

    def blocks(self, batch: Any) -> int:
        """Returns the number of row blocks if the batch has only this process's rows; else 1.

        Raises:
          ValueError: Leaves with this process's rows have different numbers of rows.
        """
        return 1 if self._leaves.own_rows(batch) is None else self._leaves.blocks

    def shapes(self, batch: Any) -> Any:
        """Returns the shapes and dtypes of a batch with the rows of all processes."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(self._leaves.shape(x), jnp.result_type(x)), batch
        )

    def place(self, batch: Any, division: Division | None) -> Any:
        """Puts a batch on the devices. With a division, the batch is padded with copies of its last
        row; without one, arrays whose rows do not divide are replicated on every device."""

        def filled(x: Any) -> jax.Array:
            if division is not None and np.ndim(x):
                x = division.filled(x, 1 if self._leaves.own(x) else None)
            return self._leaves.put(x, self._sharding(self._leaves.shape(x)))

        return jax.tree.map(filled, batch)

    def abstract(self, batch: Any, division: Division | None) -> Any:
        """Returns the shapes, dtypes and shardings on the devices of a result of :meth:`shapes`."""

        def like(x: Any) -> jax.ShapeDtypeStruct:
            shape = tuple(np.shape(x))
            shape = (division.padded, *shape[1:]) if division is not None and shape else shape
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=self._sharding(shape))

        return jax.tree.map(like, batch)

    def _constrained(self, x: jax.Array, *entries: Entry) -> jax.Array:
        return lax.with_sharding_constraint(x, self._of(*entries))

    def micro_batches(self, x: jax.Array, division: Division) -> jax.Array:
        """Reshapes [padded, ...] to [times, part, ...]; each device keeps the rows that it has."""
        tokens = self._tokens(x.shape)
        x = x.reshape(division.devices, division.times, division.each, *x.shape[1:])
        x = jnp.swapaxes(self._constrained(x, self._axes, None, None, *tokens), 0, 1)
        x = x.reshape(division.times, division.part, *x.shape[3:])
        return self._constrained(x, None, self._axes, *tokens)

    def rows(self, x: jax.Array, division: Division) -> jax.Array:
        """Reverses :meth:`micro_batches` and removes copies: [times, part, ...] becomes [rows,
        ...]."""
        x = x.reshape(division.times, division.devices, division.each, *x.shape[2:])
        x = jnp.swapaxes(self._constrained(x, None, self._axes), 0, 1)
        x = self._constrained(x.reshape(division.padded, *x.shape[3:]), self._axes)
        return division.without_copies(x)
