"""The parameters as the step computes with them, where those at rest will not do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.groups import ArrayPlacement
from zerojax.offload.update import Update
from zerojax.plan.places import DISK
from zerojax.plan.plan import Leaf, Plan


class Copies:
    """Copies in the compute dtype, or on the device, of parameters that rest elsewhere.

    Each update writes them anew, so the next step need not fetch the masters for them; they are
    no part of the state. For a state from elsewhere they are made from its masters.

    Args:
      plan: of the state.
      disk_leaf: makes a leaf on the disk, see :class:`zerojax.placement.placer.Placer`.
    """

    def __init__(self, plan: Plan, disk_leaf: Callable[..., DiskLeaf]) -> None:
        self._disk_leaf = disk_leaf
        pairs = list(zip(plan.leaves["params"], plan.compute, strict=True))
        self._plan = plan
        self.at = [i for i, (rest, now) in enumerate(pairs) if rest != now]
        self.leaves = [plan.compute[i] for i in self.at]
        rests = [lying(plan.leaves["params"][i]) for i in self.at]
        self.lying = [lying(leaf) for leaf in self.leaves]
        n = len(self.at)
        self._update = Update(
            self.cast,
            [*rests, *self.lying],
            [True] * n,
            list(range(n, 2 * n)),
            plan,
        )
        self._masters: list[weakref.ref[Any]] = []
        self._kept: list[Any] = []

    def cast(self, *params: Any) -> list[Any]:
        """The copies of those parameters that have one."""
        return [p.astype(leaf.dtype) for p, leaf in zip(params, self.leaves, strict=True)]

    def of(self, params: Sequence[Any]) -> list[Any]:
        """All parameters as the step computes with them."""
        masters = [params[i] for i in self.at]
        known = len(self._masters) == len(masters) and all(
            ref() is x for ref, x in zip(self._masters, masters, strict=True)
        )
        if not known:
            self._kept = []  # before new ones are made
            rests = [x.leaf if isinstance(x, DiskArray) else x for x in masters]
            arrays = [*rests, *self._empty()]
            self._update.run(arrays, ())
            made = arrays[len(masters) :]
            self.keep(params, [x.advance() if isinstance(x, DiskLeaf) else x for x in made])
        found = list(params)
        for i, x in zip(self.at, self._kept, strict=True):
            found[i] = x
        return found

    def keep(self, params: Sequence[Any], copies: Sequence[Any]) -> None:
        """Remembers that ``copies`` are those of ``params``."""
        self._masters = [weakref.ref(params[i]) for i in self.at]
        self._kept = list(copies)

    def take(self) -> list[Any]:
        """The copies, to be overwritten by the caller."""
        kept, self._kept, self._masters = self._kept, [], []
        return kept

    def abstract(self) -> list[Any]:
        """All parameters as the step computes with them, as ``jax.ShapeDtypeStruct``."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._plan.sharding(leaf))
            for leaf in self._plan.compute
        ]

    def _empty(self) -> list[Any]:
        """Room for the copies."""
        here = [leaf for leaf in self.leaves if leaf.place != DISK]
        zeros = jax.jit(
            lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in here],
            out_shardings=[self._plan.sharding(leaf) for leaf in here],
        )
        made = iter(zeros())
        return [self._on_disk(leaf) if leaf.place == DISK else next(made) for leaf in self.leaves]

    def _on_disk(self, leaf: Leaf) -> DiskLeaf:
        name = f"{leaf.path} in {leaf.dtype}"
        return self._disk_leaf(name, leaf.shape, leaf.dtype, self._plan.sharding(leaf))


def lying(leaf: Leaf) -> ArrayPlacement:
    """A leaf of the plan as the update knows it."""
    return ArrayPlacement(leaf.shape, jnp.dtype(leaf.dtype), leaf.spec, leaf.place)
