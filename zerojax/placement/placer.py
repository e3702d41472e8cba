"""Placement of single arrays as planned, including host memory and disk."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from zerojax.config import OffloadOptimizer, OffloadParam, ZeroConfig
from zerojax.offload.compute_copies import ComputeCopies
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.store import DiskStore
from zerojax.offload.groups import ArrayPlacement, disk_chunks
from zerojax.plan.places import DEVICE, DISK, disk_sections, offloads
from zerojax.plan.state_sharding import Leaf, Plan
from zerojax.plan.stored import StoredArray, pad, user_leaf
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree

StateArray = jax.Array | np.ndarray | StoredArray | DiskArray
"""An array of a state, in memory or on disk."""

SMALLEST, LARGEST = 2**26, 2**30
"""Bounds on the bytes of an offloaded state that one device creates at a time: a sixteenth of the
state within these bounds, or one leaf."""


class Placer:
    """Puts the arrays of states into device memory, host memory and files.

    Args:
      config: The config, which names the disks.
      mesh: The devices.
    """

    def __init__(self, config: ZeroConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._sections = disk_sections(config)
        self._number = itertools.count()
        self._copies = weakref.WeakValueDictionary[
            tuple[tuple[Leaf, ...], tuple[Leaf, ...]], ComputeCopies
        ]()

    @cached_property
    def store(self) -> DiskStore:
        """The disk that the config names, opened at its first use.

        Raises:
          DiskError: the disk cannot be used.
        """
        return self._open(self._sections[0])

    @cached_property
    def copies_store(self) -> DiskStore:
        """The disk for compute parameters: another store than ``store`` if ``offload_param`` names
        another folder than ``offload_optimizer``.

        Raises:
          DiskError: the disk cannot be used.
        """
        folders = {Path(x.nvme_path or "").expanduser().resolve() for x in self._sections}
        return self.store if len(folders) < 2 else self._open(self._sections[-1])

    @staticmethod
    def _open(section: OffloadOptimizer | OffloadParam) -> DiskStore:
        assert section.nvme_path is not None
        return DiskStore(section.nvme_path, buffer_count=section.buffer_count)

    def reserve(self, plan: Plan) -> None:
        """Checks that the disks have room for a state's leaves and compute parameters on disk.

        Raises:
          DiskError: a disk has less room, or cannot be used.
        """
        # At most, as devices may hold the same shard.
        local = jax.local_device_count() if self._mesh.devices.size > 1 else 1
        state, copies = (
            sum(min(x.bytes, x.bytes_per_device * local) for x in leaves if x.place == DISK)
            for leaves in (plan.all_leaves(), plan.copies())
        )
        if not state and not copies:
            return
        state_store, copies_store = self.store, self.copies_store
        if state_store.path.parent.stat().st_dev == copies_store.path.parent.stat().st_dev:
            state_store.reserve(state + copies)
        else:
            state_store.reserve(state)
            copies_store.reserve(copies)

    def copies(self, plan: Plan) -> ComputeCopies:
        """Returns the compute parameters of states with this plan; all steps and evaluations share
        them."""
        key = plan.leaves["params"], plan.compute
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = ComputeCopies(plan, partial(self.disk_leaf, is_copy=True))
        return copies

    def disk_leaf(
        self,
        path: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        sharding: NamedSharding,
        *,
        is_copy: bool = False,
    ) -> DiskLeaf:
        """Creates a leaf on the disk of the state, or of the compute parameters for a copy; not yet
        written."""
        at_rest = tuple(shape)
        placement = ArrayPlacement(at_rest, jnp.dtype(dtype), sharding.spec, DISK, at_rest)
        chunks = disk_chunks(placement, self._mesh, self._config.sub_group_size)
        name = f"{path} ({next(self._number)})"
        store = self.copies_store if is_copy else self.store
        return DiskLeaf(store, name, shape, dtype, sharding, chunks)

    def put(self, x: Any, sharding: NamedSharding, leaf: Leaf) -> StateArray:
        """Puts an array into the place and the sharding of its leaf in the plan."""
        x = pad(x, leaf.padded)
        if jax.process_count() > 1 and getattr(x, "is_fully_addressable", True):
            # device_put would compare the values across processes, which takes a tenth of a step of
            # 143 ms, and refuse NaN, which does not equal NaN.
            is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            values = x if is_key else np.asarray(x)
            x = jax.make_array_from_callback(x.shape, sharding, values.__getitem__)
        else:
            x = jax.device_put(x, sharding)
        if leaf.place == DISK:
            on_disk = self.disk_leaf(leaf.path, leaf.padded, leaf.dtype, sharding)
            on_disk.fill(x)
            x = on_disk.advance()
        return user_leaf(x, leaf.shape)

    def create_sharded(
        self, make: Callable[..., Parts], args: Sequence[PyTree], plan: Plan, shapes: Parts
    ) -> Parts:
        """Creates a state; with offload a few leaves at a time, so that no device holds much of it.

        Args:
          make: Returns the state, jitted: to create a few leaves does not trace it again.
          args: The arguments of ``make``.
          plan: PartitionSpec, place and bytes of every leaf.
          shapes: The results of ``make`` as shapes.

        Raises:
          DiskError: a disk has less room, or cannot be used.
        """
        leaves, shardings = plan.all_leaves(), jax.tree.leaves(plan.shardings())
        self.reserve(plan)
        placed: list[StateArray] = []
        for batch in _batches(leaves) if offloads(self._config) else [range(len(leaves))]:

            def leaves_of_batch(*args: PyTree, batch: range = batch) -> list[jax.Array]:
                created = jax.tree.leaves(make(*args))
                return [pad(created[i], leaves[i].padded) for i in batch]

            # In device memory, from which `put` moves each batch before the next is created.
            on_device = [shardings[i].with_memory_kind(None) for i in batch]
            arrays = jax.jit(leaves_of_batch, out_shardings=on_device)(*args)
            for i in batch:
                x, leaf = arrays.pop(0), leaves[i]
                if leaf.place == DEVICE:  # in place; device_put refuses keys of several processes
                    placed.append(user_leaf(x, leaf.shape))
                else:
                    placed.append(self.put(x, shardings[i], leaf))
        return jax.tree.unflatten(jax.tree.structure(shapes), placed)


def _batches(leaves: Sequence[Leaf]) -> list[range]:
    """Splits the leaves into ranges that are created together, in order."""
    sixteenth = sum(leaf.bytes_per_device for leaf in leaves) // 16
    limit = min(LARGEST, max(SMALLEST, sixteenth))
    starts, size = [0], 0
    for i, leaf in enumerate(leaves):
        if i > starts[-1] and size + leaf.bytes_per_device > limit:
            starts.append(i)
            size = 0
        size += leaf.bytes_per_device
    return [range(*ends) for ends in itertools.pairwise([*starts, len(leaves)])]
