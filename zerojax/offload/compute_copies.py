"""Compute parameters that are stored beside the state, because the parameters at rest have another
place or dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.groups import ArrayPlacement
from zerojax.offload.update import Update
from zerojax.plan.places import DISK
from zerojax.plan.state_sharding import Leaf, Plan


class ComputeCopies:
    """Copies, in the compute dtype or on the device, of parameters that rest elsewhere.

    Each update writes the copies too, so that the next step need not fetch the masters. The copies
    are not part of the state: for a state other than the last update's, such as a restored one,
    they are computed from its masters.

    Args:
      plan: PartitionSpec and bytes of every leaf.
      disk_leaf: Creates a leaf on the disk, see :class:`zerojax.placement.placer.Placer`.

    Attributes:
      at: Indices of the parameters that have a copy.
      placements: The placement of each copy.
    """

    def __init__(self, plan: Plan, disk_leaf: Callable[..., DiskLeaf]) -> None:
        self._plan, self._disk_leaf = plan, disk_leaf
        pairs = list(zip(plan.leaves["params"], plan.compute, strict=True))
        self.at: list[int] = [i for i, (rest, compute) in enumerate(pairs) if rest != compute]
        self._leaves = [plan.compute[i] for i in self.at]
        self.placements: list[ArrayPlacement] = [placement_of(leaf) for leaf in self._leaves]
        masters = [placement_of(plan.leaves["params"][i]) for i in self.at]
        n = len(self.at)
        self._update = Update(
            self.cast, [*masters, *self.placements], [True] * n, list(range(n, 2 * n)), plan
        )
        self._masters: list[weakref.ref[jax.Array | DiskArray]] = []
        self._copies: list[jax.Array | DiskArray] = []

    def cast(self, *params: jax.Array) -> list[jax.Array]:
        """Casts the masters at ``at`` to the compute dtypes."""
        return [p.astype(leaf.dtype) for p, leaf in zip(params, self._leaves, strict=True)]

    def of(self, params: Sequence[jax.Array | DiskArray]) -> list[jax.Array | DiskArray]:
        """Returns the compute parameters of ``params``, in their order."""
        masters = [params[i] for i in self.at]
        is_current = len(self._masters) == len(masters) and all(
            ref() is x for ref, x in zip(self._masters, masters, strict=True)
        )
        if not is_current:
            self._copies = []  # frees the old copies before new ones exist
            sources = [x.leaf if isinstance(x, DiskArray) else x for x in masters]
            arrays = [*sources, *self._empty()]
            self._update.run(arrays, ())
            copies = arrays[len(masters) :]
            self.keep(params, [x.advance() if isinstance(x, DiskLeaf) else x for x in copies])
        compute = list(params)
        for i, x in zip(self.at, self._copies, strict=True):
            compute[i] = x
        return compute

    def keep(
        self, params: Sequence[jax.Array | DiskArray], copies: Sequence[jax.Array | DiskArray]
    ) -> None:
        """Keeps ``copies`` as the copies of ``params``."""
        # Weak, so that a state that the user drops is freed.
        self._masters = [weakref.ref(params[i]) for i in self.at]
        self._copies = list(copies)

    def take(self) -> list[jax.Array | DiskArray]:
        """Hands the copies over to the caller, who overwrites them."""
        copies, self._copies, self._masters = self._copies, [], []
        return copies

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Returns all compute parameters as ``jax.ShapeDtypeStruct``."""
        return [
            jax.ShapeDtypeStruct(leaf.padded, leaf.dtype, sharding=self._plan.sharding(leaf))
            for leaf in self._plan.compute
        ]

    def _empty(self) -> list[jax.Array | DiskLeaf]:
        """Allocates arrays for the copies; their values are not yet written."""
        in_memory = [leaf for leaf in self._leaves if leaf.place != DISK]
        zeros = jax.jit(
            lambda: [jnp.zeros(leaf.padded, leaf.dtype) for leaf in in_memory],
            out_shardings=[self._plan.sharding(leaf) for leaf in in_memory],
        )
        arrays = iter(zeros())
        return [
            self._on_disk(leaf) if leaf.place == DISK else next(arrays) for leaf in self._leaves
        ]

    def _on_disk(self, leaf: Leaf) -> DiskLeaf:
        name = f"{leaf.path} in {leaf.dtype}"
        return self._disk_leaf(name, leaf.padded, leaf.dtype, self._plan.sharding(leaf))


def placement_of(leaf: Leaf) -> ArrayPlacement:
    """Converts a leaf of the plan to what :class:`zerojax.offload.update.Update` takes."""
    return ArrayPlacement(leaf.shape, leaf.dtype, leaf.spec, leaf.place, leaf.padded)
