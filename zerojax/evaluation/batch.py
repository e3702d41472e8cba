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
"""The axes that cut one dimension."""


class Division(NamedTuple):
    """A batch in micro-batches of equal size, the last rows of which may be copies.

    Attributes:
      rows: Rows of the batch.
      times: Number of micro-batches.
      each: Rows of one device in a micro-batch.
      devices: Number of devices that share the rows.
      blocks: Blocks of rows, each of which has copies of its own last row; one a process.
    """

    rows: int
    times: int
    each: int
    devices: int
    blocks: int = 1

    @classmethod
    def of(cls, rows: int, micro: int | None, devices: int, blocks: int = 1) -> Division | None:
        """The fewest micro-batches of at most ``micro`` rows a device; None where the batch is one,
        and its rows divide among the devices.

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
        """int [padded], the row in each place, of so many of the batch's blocks."""
        rows, padded = self.rows // self.blocks, self.padded // self.blocks
        one = np.minimum(np.arange(padded), rows - 1)
        return np.add.outer(rows * np.arange(blocks), one).reshape(-1)

    def counts(self) -> np.ndarray:
        """bool [padded], whether a place has a row of its own, and no copy."""
        padded = self.padded // self.blocks
        return np.arange(self.padded) % padded < self.rows // self.blocks

    def filled(self, x: Any, blocks: int | None = None) -> Any:
        """``[rows, ...]`` with copies, of all blocks or of so many."""
        return x if self.padded == self.rows else x[self.places(blocks or self.blocks)]

    def without_copies(self, x: jax.Array) -> jax.Array:
        """The way back, ``[padded, ...]`` as ``[rows, ...]``."""
        if self.padded == self.rows:
            return x
        x = x.reshape(self.blocks, -1, *x.shape[1:])[:, : self.rows // self.blocks]
        return x.reshape(self.rows, *x.shape[2:])


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
        self._leaves = BatchRows(mesh)
        self._parts = sequence_size(mesh)

    def _of(self, *entries: Entry) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*entries))

    def _sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        even = bool(shape) and shape[0] % self.devices == 0
        tokens = self._tokens(shape)
        return self._of(*((self._axes if even else None,) if even or tokens else ()), *tokens)

    def _tokens(self, shape: tuple[int, ...]) -> tuple[Entry, ...]:
        """The entry of the tokens of an array, if it has them.

        Raises:
          ValueError: They do not divide among the devices.
        """
        if entry := tokens_entry(shape, self._parts):
            check_tokens(f"the batch's array {shape}", shape[1], self._parts)
        return entry

    def blocks(self, batch: Any) -> int:
        """Blocks of rows, where the batch has a process's own rows; else 1.

        Raises:
          ValueError: Leaves with own rows have several numbers of them.
        """
        return 1 if self._leaves.own_rows(batch) is None else self._leaves.blocks

    def shapes(self, batch: Any) -> Any:
        """Shapes and dtypes of a batch with the rows of all processes."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(self._leaves.shape(x), jnp.result_type(x)), batch
        )

    def place(self, batch: Any, division: Division | None) -> Any:
        """Puts a batch on the devices: one with a division filled up with copies of its last row,
        of another one the arrays whose rows do not divide on every device."""

        def filled(x: Any) -> jax.Array:
            if division is not None and np.ndim(x):
                x = division.filled(x, 1 if self._leaves.own(x) else None)
            return self._leaves.put(x, self._sharding(self._leaves.shape(x)))

        return jax.tree.map(filled, batch)

    def abstract(self, batch: Any, division: Division | None) -> Any:
        """Shapes, dtypes and shardings on the devices, of what :meth:`shapes` gives."""

        def like(x: Any) -> jax.ShapeDtypeStruct:
            shape = tuple(np.shape(x))
            shape = (division.padded, *shape[1:]) if division is not None and shape else shape
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=self._sharding(shape))

        return jax.tree.map(like, batch)

    def _constrained(self, x: jax.Array, *entries: Entry) -> jax.Array:
        return lax.with_sharding_constraint(x, self._of(*entries))

    def micro_batches(self, x: jax.Array, division: Division) -> jax.Array:
        """``[padded, ...]`` as ``[times, part, ...]``, each device with rows that it has."""
        tokens = self._tokens(x.shape)
        x = x.reshape(division.devices, division.times, division.each, *x.shape[1:])
        x = jnp.swapaxes(self._constrained(x, self._axes, None, None, *tokens), 0, 1)
        x = x.reshape(division.times, division.part, *x.shape[3:])
        return self._constrained(x, None, self._axes, *tokens)

    def rows(self, x: jax.Array, division: Division) -> jax.Array:
        """The way back, ``[times, part, ...]`` as ``[rows, ...]``."""
        x = x.reshape(division.times, division.devices, division.each, *x.shape[2:])
        x = jnp.swapaxes(self._constrained(x, None, self._axes), 0, 1)
        x = self._constrained(x.reshape(division.padded, *x.shape[3:]), self._axes)
        return division.without_copies(x)
