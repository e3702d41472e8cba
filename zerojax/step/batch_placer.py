"""The placement of batches on the devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.devices.mesh import batch_axes, batch_devices, sequence_size
from zerojax.devices.rows import BatchRows
from zerojax.step.sequence import check_tokens, tokens_entry
from zerojax.xla.types import PyTree


class BatchPlacer:
    """Puts batches on the devices, sharded by their rows and, on a sequence axis, by their tokens.

    The leading dimension of every leaf, or another dimension, is the global batch, of which a
    process may pass only its own rows, see :class:`BatchRows`. Dimensions that divide among the
    devices are sharded, the other leaves are replicated.

    With accumulation the global batch is split into micro-batches of consecutive rows,
    ``[B, ...] -> [k, B / k, ...]``, and each micro-batch is sharded over the data-parallel devices;
    with several processes, a micro-batch has consecutive rows of each process.

    Args:
      mesh: The devices.
      accumulation: Number of micro-batches.
      axis: The dimension of rows; 0 under accumulation.

    Attributes:
      accumulation, axis: The arguments of these names.
      world: Number of devices that share the rows.
      leaves: The rows of each leaf that a process has.
    """

    accumulation: int
    axis: int
    world: int
    leaves: BatchRows

    def __init__(self, mesh: Mesh, accumulation: int = 1, axis: int = 0) -> None:
        self.accumulation, self.axis, self.world = accumulation, axis, batch_devices(mesh)
        self.leaves = BatchRows(mesh, axis)
        self._mesh, self._parts = mesh, sequence_size(mesh)
        axes = batch_axes(mesh)
        self._rows = (None, axes) if accumulation > 1 else (*[None] * axis, axes)
        # Cached by kind of array, because every step places a batch.
        self._sharded = functools.cache(self._sharded_by)
        self._deal = functools.cache(lambda sharding: jax.jit(self._dealt, out_shardings=sharding))

    def place(self, batch: PyTree) -> PyTree:
        """Puts a batch on the devices."""
        return jax.tree.map(self._place, batch)

    def shapes(self, batch: PyTree) -> PyTree:
        """Returns the shapes and dtypes of a batch with the rows of all processes."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(self.leaves.shape(x), jnp.result_type(x)), batch
        )

    def abstract(self, batch: PyTree) -> PyTree:
        """Returns the shapes, dtypes and shardings of a batch on the devices."""

        def on_devices(x: ArrayLike) -> jax.ShapeDtypeStruct:
            shape = self._divided(self.leaves.shape(x))
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x), sharding=self._sharding(x))

        return jax.tree.map(on_devices, batch)

    def check_tokens(self, batch: PyTree) -> None:
        """Raises ValueError if the tokens of an array do not divide among the devices."""
        if self._parts == 1:
            return
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            if tokens_entry((shape := np.shape(x))[self.axis :], self._parts):
                name = f"the batch's array {jax.tree_util.keystr(path)} {shape}"
                check_tokens(name.replace("  ", " "), shape[self.axis + 1], self._parts)

    def _sharding(self, x: ArrayLike) -> NamedSharding:
        shape = self.leaves.shape(x)
        rows = shape[self.axis] if shape else 0
        divides = bool(rows and rows % self.world == 0)
        return self._sharded(divides, tokens_entry(shape[self.axis :], self._parts))

    def _sharded_by(self, rows: bool, tokens: tuple[str, ...]) -> NamedSharding:
        """Returns the sharding by rows, if ``rows``, and by tokens."""
        no_axes = (None,) * len(self._rows) if tokens else ()
        return NamedSharding(self._mesh, PartitionSpec(*(self._rows if rows else no_axes), *tokens))

    def _divided(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        k = self.accumulation
        return (k, shape[0] // k, *shape[1:]) if shape and k > 1 else tuple(shape)

    def _dealt(self, x: jax.Array) -> jax.Array:
        """Reshapes [B, ...] to [k, B / k, ...], micro-batches of consecutive rows per process."""
        # With rows of every process in each micro-batch, no row moves to another process.
        k, blocks, n = self.accumulation, self.leaves.blocks, x.shape[0]
        x = x.reshape(blocks, k, n // (blocks * k), *x.shape[1:])
        return x.swapaxes(0, 1).reshape(k, n // k, *x.shape[3:])

    def _place(self, x: Any) -> jax.Array:
        sharding = self._sharding(x)
        if self.accumulation == 1 or not np.ndim(x):
            return self.leaves.put(x, sharding)
        if self.leaves.blocks > 1 and not self.leaves.own(x):
            return self._deal(sharding)(x)
        return self.leaves.put(x.reshape(self._divided(x.shape)), sharding, axis=1)
