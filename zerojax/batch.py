"""The batch: checked, cut into micro-batches, and laid over the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import BatchSizes


class BatchLayout:
    """Where a batch goes.

    The leading dimension of every leaf is the global batch. With accumulation it is cut into
    micro-batches of consecutive rows, ``[B, ...] -> [k, B / k, ...]``, and each of those is
    sharded over the data-parallel devices.
    """

    def __init__(self, mesh: Mesh, axis: str, sizes: BatchSizes) -> None:
        self.sizes, self.world = sizes, mesh.shape[axis]
        rows = (None, axis) if sizes.accumulation > 1 else (axis,)
        self.sharded = NamedSharding(mesh, PartitionSpec(*rows))
        self.replicated = NamedSharding(mesh, PartitionSpec())

    def place(self, batch: Any) -> Any:
        """Checks a batch of arrays and puts it on the devices."""
        self.check(batch)
        leaves, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(tree, [self._place(x) for x in leaves])

    def abstract(self, batch: Any) -> Any:
        """The same for ``jax.ShapeDtypeStruct`` leaves."""
        self.check(batch)
        leaves, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(
            tree,
            [
                jax.ShapeDtypeStruct(
                    self._cut(x.shape),
                    x.dtype,
                    sharding=self.sharded if x.shape else self.replicated,
                )
                for x in leaves
            ],
        )

    def check(self, batch: Any) -> None:
        """Raises ValueError where the batch does not fit the devices or the config."""
        rows = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
        if len(rows) != 1:
            self._explain(batch)
        (n,) = rows
        if not n:
            raise ValueError("the batch is empty: its leading dimension is 0.")
        if self.sizes.train is not None and n != self.sizes.train:
            raise ValueError(
                f"the batch has {n} rows, but train_batch_size is {self.sizes.train}: pass the "
                "global batch, or change train_batch_size (or leave it out)."
            )
        k = self.sizes.accumulation
        if n % (k * self.world):
            by = f"{self.world} devices" + (f" x {k} micro-batches" if k > 1 else "")
            raise ValueError(
                f"the batch's leading dimension {n} is not divisible by {k * self.world} ({by}): "
                f"use {n - n % (k * self.world)} or {n - n % (k * self.world) + k * self.world} "
                "rows, or fewer devices."
            )

    def rows(self, batch: Any) -> int:
        """The leading dimension of a batch that was checked."""
        return next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))

    def _explain(self, batch: Any) -> None:
        shapes = {
            jax.tree_util.keystr(path) or "batch": np.shape(x)
            for path, x in jax.tree_util.tree_leaves_with_path(batch)
        }
        if not any(shapes.values()):
            raise ValueError(
                "the batch is empty: it has no array with a leading batch dimension"
                + (f" (only scalars: {', '.join(shapes)})." if shapes else ".")
            )
        raise ValueError(
            f"the batch's leaves disagree on the leading dimension: {shapes}. Every array of a "
            "batch has one row an example; pass what has none as a further argument of the step."
        )

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        k = self.sizes.accumulation
        return (k, shape[0] // k, *shape[1:]) if shape and k > 1 else tuple(shape)

    def _place(self, x: Any) -> jax.Array:
        if not np.ndim(x):
            return jax.device_put(x, self.replicated)
        if self.sizes.accumulation > 1:
            x = x.reshape(self._cut(x.shape))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(self.sharded, x.ndim):
            return x
        return jax.device_put(x, self.sharded)
