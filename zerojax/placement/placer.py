"""Puts arrays where the plan has them, in host memory and on disk too."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.config import OffloadOptimizer, OffloadParam, ZeroConfig
from zerojax.offload.copies import Copies
from zerojax.offload.disk.array import DiskLeaf
from zerojax.offload.disk.space import DiskStore
from zerojax.offload.groups import ArrayPlacement, cuts
from zerojax.plan.places import DISK
from zerojax.plan.plan import Leaf, Plan
from zerojax.train_state.state_parts import Parts

SMALLEST, LARGEST = 2**26, 2**30
"""Bytes of a state that one device makes at a time, where the state is born elsewhere: a sixteenth
of it within these bounds, or one leaf."""


class Placer:
    """Where a state is put.

    Args:
      config: names the disk, if there is one.
      mesh: the devices.
    """

    def __init__(self, config: ZeroConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        sections = config.offload_optimizer, config.offload_param
        self._sections = [s for s in sections if s is not None and s.device == "nvme"]
        self._store: DiskStore | None = None
        self._copies: DiskStore | None = None
        self._number = itertools.count()
        self._computing: weakref.WeakValueDictionary[Any, Copies] = weakref.WeakValueDictionary()

    @property
    def store(self) -> DiskStore:
        """The disk that the config names, opened at its first use.

        Raises:
          DiskError: it cannot be used.
        """
        if self._store is None:
            self._store = _opened(self._sections[0])
        return self._store

    @property
    def copies_store(self) -> DiskStore:
        """The disk for the parameters that the step computes with: another one where
        ``offload_param`` names another folder than ``offload_optimizer``.

        Raises:
          DiskError: it cannot be used.
        """
        if len({_folder(section) for section in self._sections}) < 2:
            return self.store
        if self._copies is None:
            self._copies = _opened(self._sections[-1])
        return self._copies

    def reserve(self, plan: Plan) -> None:
        """Checks that the disk has room for what belongs there of a state, and for the copies to
        compute with.

        Raises:
          DiskError: there is not.
        """
        state, copies = (
            sum(self._bytes(leaf) for leaf in leaves if leaf.place == DISK)
            for leaves in (plan.all_leaves(), plan.copies())
        )
        if not state and not copies:
            return
        here, there = self.store, self.copies_store
        if here.path.parent.stat().st_dev == there.path.parent.stat().st_dev:
            here.reserve(state + copies)
        else:
            here.reserve(state)
            there.reserve(copies)

    def copies(self, plan: Plan) -> Copies:
        """The copies to compute with of such a state: one for all who compute with it."""
        key = plan.leaves["params"], plan.compute
        found = self._computing.get(key)
        if found is None:
            found = self._computing[key] = Copies(plan, self.copy_leaf)
        return found

    def copy_leaf(
        self, path: str, shape: Sequence[int], dtype: Any, sharding: NamedSharding
    ) -> DiskLeaf:
        """A new leaf for a compute parameter, still empty."""
        return self.disk_leaf(path, shape, dtype, sharding, self.copies_store)

    def disk_leaf(
        self,
        path: str,
        shape: Sequence[int],
        dtype: Any,
        sharding: NamedSharding,
        store: DiskStore | None = None,
    ) -> DiskLeaf:
        """A new leaf on the disk, still empty."""
        lying = ArrayPlacement(tuple(shape), jnp.dtype(dtype), sharding.spec, DISK)
        pieces = cuts(lying, self._mesh, self._config.sub_group_size)
        name = f"{path} ({next(self._number)})"
        return DiskLeaf(store or self.store, name, shape, dtype, sharding, pieces)

    def put(self, x: Any, sharding: NamedSharding, leaf: Leaf) -> Any:
        """One array where it is to lie."""
        if leaf.place != DISK:
            return jax.device_put(x, sharding)
        made = self.disk_leaf(leaf.path, np.shape(x), leaf.dtype, sharding)
        made.fill(jax.device_put(x, sharding))
        return made.advance()

    def born(
        self, make: Callable[..., Parts], args: Sequence[Any], plan: Plan, shapes: Parts
    ) -> Parts:
        """Makes a state so that no device holds much of it at a time.

        Args:
          make: makes it, under ``jit``.
          args: of ``make``.
          plan: where it goes.
          shapes: what ``make`` returns.
        """
        leaves, shardings = plan.all_leaves(), jax.tree.leaves(plan.shardings())
        self.reserve(plan)
        found: list[Any] = []
        for some in _batches(leaves):

            def chosen(*args: Any, some: list[int] = some) -> list[Any]:
                all_ = jax.tree.leaves(make(*args))
                return [all_[i] for i in some]

            on_device = [shardings[i].with_memory_kind(None) for i in some]
            made = jax.jit(chosen, out_shardings=on_device)(*args)
            while made:
                i, x = some[len(some) - len(made)], made.pop(0)
                found.append(self.put(x, shardings[i], leaves[i]))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    def _bytes(self, leaf: Leaf) -> int:
        """On this process's disk; an upper bound, as devices may hold the same."""
        here = jax.local_device_count() if len(self._mesh.devices.flat) > 1 else 1
        return min(leaf.bytes, leaf.bytes_per_device * here)


def _opened(section: OffloadOptimizer | OffloadParam) -> DiskStore:
    assert section.nvme_path is not None
    return DiskStore(section.nvme_path, buffer_count=section.buffer_count)


def _folder(section: OffloadOptimizer | OffloadParam) -> Path:
    assert section.nvme_path is not None
    return Path(section.nvme_path).expanduser().resolve()


def _batches(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Leaves that are made together, in order."""
    sixteenth = sum(leaf.bytes_per_device for leaf in leaves) // 16
    most = min(LARGEST, max(SMALLEST, sixteenth))
    found: list[list[int]] = [[]]
    size = 0
    for i, leaf in enumerate(leaves):
        if found[-1] and size + leaf.bytes_per_device > most:
            found.append([])
            size = 0
        found[-1].append(i)
        size += leaf.bytes_per_device
    return found
