"""The batch of an evaluation: any number of rows, divided into micro-batches on the devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.devices.mesh import batch_axes, sequence_size
from zerojax.devices.rows import BatchRows
from zerojax.plan.layout import SpecEntry
from zerojax.step.sequence import tokens_entry
from zerojax.xla.types import PyTree

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
        """Rows of a micro-batch, on all devices together."""
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

    def pad(self, batch: PyTree, leaves: BatchRows) -> PyTree:
        """Pads the arrays of a batch with copies, those of all blocks, or a process's own rows."""

        def padded(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
            if self.padded == self.rows or not np.ndim(x):
                return x
            return x[self.places(1 if leaves.own(x) else self.blocks)]

        return jax.tree.map(padded, batch)

    def without_copies(self, x: jax.Array) -> jax.Array:
        """Removes the copies: [padded, ...] becomes [rows, ...]."""
        if self.padded == self.rows:
            return x
        x = x.reshape(self.blocks, -1, *x.shape[1:])[:, : self.rows // self.blocks]
        return x.reshape(self.rows, *x.shape[2:])

    def micro_batches(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Reshapes [padded, ...] to [times, part, ...]; each device keeps the rows that it has."""
        # A micro-batch has rows of every device, so that no row moves.
        axes, tokens = batch_axes(mesh), tokens_entry(x.shape, sequence_size(mesh))
        x = x.reshape(self.devices, self.times, self.each, *x.shape[1:])
        x = jnp.swapaxes(_constrained(x, mesh, axes, None, None, *tokens), 0, 1)
        x = x.reshape(self.times, self.part, *x.shape[3:])
        return _constrained(x, mesh, None, axes, *tokens)

    def in_rows(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """Reverses :meth:`micro_batches` and removes copies: [times, part, ...] becomes [rows,
        ...]."""
        axes = batch_axes(mesh)
        x = x.reshape(self.times, self.devices, self.each, *x.shape[2:])
        x = jnp.swapaxes(_constrained(x, mesh, None, axes), 0, 1)
        x = _constrained(x.reshape(self.padded, *x.shape[3:]), mesh, axes)
        return self.without_copies(x)


def rows_of(batch: PyTree) -> int | None:
    """Returns the leading dimension of all arrays of a batch; None if arrays have different ones.

    Raises:
      ValueError: The batch has no rows.
    """
    found = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if not found or 0 in found:
        raise ValueError(
            "the batch is empty: "
            + ("its leading dimension is 0" if found else "it has no array with rows")
            + ": pass arrays [rows, ...] with at least one row."
        )
    return found.pop() if len(found) == 1 else None


def like(batch: PyTree, rows: int) -> PyTree:
    """Returns the shapes and dtypes of a batch, with ``rows`` as leading dimension."""

    def shape(x: ArrayLike) -> jax.ShapeDtypeStruct:
        dims = (rows, *jnp.shape(x)[1:]) if jnp.ndim(x) else ()
        return jax.ShapeDtypeStruct(dims, jnp.result_type(x))

    return jax.tree.map(shape, batch)


def _constrained(x: jax.Array, mesh: Mesh, *entries: SpecEntry) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))
