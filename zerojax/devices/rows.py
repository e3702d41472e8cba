"""The rows of a batch that a process has, and their assembly into global arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.devices.mesh import mesh as all_devices
from zerojax.xla.types import PyTree


class RowBlocks(NamedTuple):
    """The distribution of a batch's rows over the processes, in equal consecutive blocks.

    Attributes:
      number: Number of blocks: one per process, or fewer if processes share their rows, as
        processes that shard one model do; 1 in a single process.
      own: Index of this process's block, from 0.
    """

    number: int
    own: int

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> RowBlocks | None:
        """Returns the blocks; None if some process's rows are not such a block, as on a mesh in
        which the devices of two processes alternate."""
        if jax.process_count() == 1 or isinstance(mesh, AbstractMesh):
            return cls(1, 0)
        rows = batch_devices(mesh)
        axes = [mesh.axis_names.index(name) for name in batch_axes(mesh)]
        lines = np.moveaxis(mesh.devices, axes, range(len(axes))).reshape(rows, -1)
        rows_of: dict[int, set[int]] = {}
        for at, devices in enumerate(lines):
            for device in devices:
                rows_of.setdefault(device.process_index, set()).add(at)
        blocks = sorted({tuple(sorted(each)) for each in rows_of.values()})
        in_order = [at for block in blocks for at in block] == [*range(rows)]
        if not in_order or len({*map(len, blocks)}) > 1 or jax.process_index() not in rows_of:
            return None
        return cls(len(blocks), min(rows_of[jax.process_index()]) // len(blocks[0]))


def process_rows(n: int, mesh: Mesh | None = None) -> slice:
    """Returns the rows of a global batch that this process feeds:
    ``batch[zerojax.process_rows(n)]``.

    Args:
      n: Number of rows of the global batch.
      mesh: The mesh of ``zerojax.zero(..., mesh=mesh)``; by default all devices on one "data" axis.
        Processes that shard one model between them have the same rows.

    Raises:
      ValueError: The rows do not divide among the processes, or the rows of a process on this mesh
        are not consecutive.

    Example:
      >>> import zerojax
      >>> zerojax.process_rows(32)  # the only process
      slice(0, 32, None)
    """
    blocks = RowBlocks.of(all_devices() if mesh is None else mesh)
    if blocks is None:
        raise ValueError(_NO_BLOCKS)
    block_size, remainder = divmod(n, blocks.number)
    if remainder:
        fits = " or ".join(str(m) for m in (n - remainder, n - remainder + blocks.number) if m)
        raise ValueError(f"{n} rows do not divide among {blocks.number} processes: use {fits}.")
    return slice(blocks.own * block_size, (blocks.own + 1) * block_size)


_NO_BLOCKS = (
    "on this mesh a process has no block of neighbouring rows, as the processes' devices alternate "
    "or differ in number: use zerojax.mesh(), or pass global arrays (jax.make_array_from_callback)."
)


class BatchRows:
    """The leaves of batches on a mesh, whether a process passes its own rows or global arrays.

    With several processes, a leaf that is not a global ``jax.Array`` holds the process's own rows,
    and scalars must be equal in all processes. This class compares nothing between processes.

    Args:
      mesh: The mesh.
      axis: The dimension of a leaf that has the rows; a leaf without this dimension has no rows.

    Attributes:
      blocks: Blocks of rows, see :class:`RowBlocks`.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, axis: int = 0) -> None:
        self._axis = axis
        self._several = jax.process_count() > 1
        self._known = RowBlocks.of(mesh)
        self.blocks: int = 1 if self._known is None else self._known.number

    def own(self, x: ArrayLike) -> bool:
        """Returns whether a leaf holds only the process's own rows."""
        if not self._several or np.ndim(x) <= self._axis or isinstance(x, jax.ShapeDtypeStruct):
            return False
        return not isinstance(x, jax.Array) or x.is_fully_addressable

    def shape(self, x: ArrayLike) -> tuple[int, ...]:
        """Returns the global shape of a leaf, with the rows of all processes."""
        shape: tuple[int, ...] = np.shape(x)
        return _times(shape, self.blocks, self._axis) if self.own(x) else shape

    def own_rows(self, batch: PyTree) -> int | None:
        """Returns the number of rows of the leaves that hold own rows; None if no leaf does.

        Raises:
          ValueError: Those leaves have several numbers of rows, or the mesh has no blocks.
        """
        leaves = [x for x in jax.tree.leaves(batch) if self.own(x)]
        if leaves and self._known is None:
            raise ValueError(_NO_BLOCKS)
        if len({np.shape(x)[self._axis] for x in leaves}) > 1:
            shapes = {
                jax.tree_util.keystr(path): np.shape(x)
                for path, x in jax.tree_util.tree_leaves_with_path(batch)
                if self.own(x)
            }
            raise ValueError(
                f"the batch's leaves disagree on the {dimension(self._axis)}: {shapes}. In several "
                "processes each leaf is the process's own rows: pass others as further arguments"
            )
        return np.shape(leaves[0])[self._axis] if leaves else None

    def put(self, x: Any, sharding: NamedSharding, axis: int | None = None) -> jax.Array:
        """Places a leaf by ``sharding``; returns the array itself if it is placed so already.

        Args:
          x: The leaf, with own rows in dimension ``axis``, by default in the axis of all leaves.
          sharding: The target sharding, which shards that dimension if the rows are the process's
            own.
        """
        if self.own(x):
            x = x if isinstance(x, jax.Array) else np.asarray(x)
            shape = _times(np.shape(x), self.blocks, self._axis if axis is None else axis)
            return cast(jax.Array, jax.make_array_from_process_local_data(sharding, x, shape))
        if self._several and not isinstance(x, jax.Array):
            return jnp.asarray(x)  # a scalar for jit; device_put would compare it
        if self._several and x.is_fully_addressable:
            return cast(jax.Array, jax.make_array_from_process_local_data(sharding, x, x.shape))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return cast(jax.Array, jax.device_put(x, sharding))


def dimension(axis: int) -> str:
    """Describes the dimension of a batch's arrays that has the rows."""
    return f"dimension {axis}" if axis else "leading dimension"


def _times(shape: tuple[int, ...], n: int, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * n, *shape[axis + 1 :])
