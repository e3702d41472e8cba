"""The placement of an existing state's arrays: each one where the plan has it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.devices.mesh import same_devices
from zerojax.distributed.equality import require_same_values
from zerojax.distributed.lockstep import lockstep
from zerojax.offload.disk.array import DiskArray
from zerojax.placement.checks import check_one_copy
from zerojax.placement.placer import Placer, StateArray
from zerojax.plan import layout
from zerojax.plan.places import DISK
from zerojax.plan.state_sharding import Leaf, Plan
from zerojax.plan.stored import StoredArray, unwrap_stored
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla.types import PyTree

FEWEST = 1_000
"""References between two searches for those whose array is gone."""


class OwnedArrays:
    """Weak references to the arrays that zerojax created for a caller, and that a step may donate;
    of states that have no other mark of zerojax."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._limit = FEWEST

    def add(self, tree: PyTree) -> None:
        """Records the arrays of a state that zerojax returns to a caller."""
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        self.extend([*map(weakref.ref, arrays)])

    def extend(self, references: Sequence[weakref.ref[Any]]) -> None:
        """Records arrays by weak references to them."""
        self._references += references
        if len(self._references) > self._limit:
            self._references = [ref for ref in self._references if ref() is not None]
            self._limit = FEWEST + 2 * len(self._references)

    def ids(self) -> set[int]:
        """Returns the ``id`` of each array."""
        return {id(x) for ref in self._references if (x := ref()) is not None}


class StatePlacer:
    """Places the arrays of states with one plan.

    Args:
      placer: Puts single arrays into the places of the plan.
      owned: The arrays that zerojax created.
      plan: PartitionSpec and place of every leaf.
    """

    def __init__(self, placer: Placer, owned: OwnedArrays, plan: Plan) -> None:
        self._placer, self._owned, self._mesh = placer, owned, plan.mesh
        self._where = list(zip(jax.tree.leaves(plan.shardings()), plan.all_leaves(), strict=True))
        self._read: dict[int, tuple[weakref.ref[object], object]] = {}

    def donatable(self, opened: OpenedState) -> Parts:
        """Places the arrays of a state whose memory a step takes over.

        An array is copied, so that the caller's array survives, unless zerojax created it and it
        is already placed: a ``TrainState`` or NNX objects are copied entirely or not at all, any
        other pytree array by array. The second occurrence of an array is copied, because the step
        donates each.

        Raises:
          ValueError: The state is on another mesh.
        """
        parts = opened.parts
        leaves = jax.tree.leaves(parts)
        targets = [(x, *where) for x, where in zip(leaves, self._where, strict=True)]
        are_placed = [not opened.plain and _is_placed(*each) for each in targets]
        any_pytree = opened.kind.any_pytree
        if not any_pytree and all(are_placed) and len({*map(id, leaves)}) == len(leaves):
            return parts
        self._check_mesh(parts)
        if lockstep(self._mesh):
            require_same_values("the state", by_path(parts))
        if any_pytree:
            placed = {id(x) for x, is_in in zip(leaves, are_placed, strict=True) if is_in}
            kept = placed & self._owned.ids()
        else:
            kept = {id(x) for x in leaves} if all(are_placed) else set()
        arrays = [self._kept_or_copied(kept, *each) for each in targets]
        return jax.tree.unflatten(jax.tree.structure(parts), arrays)

    def readable(self, leaves: Sequence[StateArray], used: Sequence[bool]) -> list[Any]:
        """Places the arrays of a state that a program only reads; None for those it does not use.

        Arrays that are already placed are used unchanged. Others, such as those of a state that has
        not been through zerojax, are placed, and the placed array is reused for as long as the same
        one comes again.

        Raises:
          ValueError: The state is on another mesh.
        """
        return [unwrap_stored(self._at(i, x)) if used[i] else None for i, x in enumerate(leaves)]

    def _at(self, i: int, x: StateArray) -> object:
        sharding, leaf = self._where[i]
        if _is_placed(x, sharding, leaf):
            self._read.pop(i, None)
            return x
        ref, placed = self._read.get(i, (lambda: None, None))
        if ref() is x:
            return placed
        self._check_mesh({leaf.path: x})
        placed = self._placer.put(x, sharding, leaf)
        if x.ndim:
            self._read[i] = weakref.ref(x), placed
        return placed

    def _kept_or_copied(
        self, kept: set[int], x: StateArray, sharding: NamedSharding, leaf: Leaf
    ) -> object:
        """Places an array; copies it unless it is in ``kept``, from which it is removed."""
        if id(x) in kept:
            kept.remove(id(x))
            return x
        if isinstance(x, StoredArray) and _is_placed(x, sharding, leaf) and leaf.place != DISK:
            return StoredArray(x.stored.copy(), x.shape)  # not gathered
        return self._placer.put(_copy(x), sharding, leaf)

    def _check_mesh(self, parts: PyTree) -> None:
        """Raises ValueError if an array of a state is on another mesh."""
        check_one_copy(parts)
        for path, x in jax.tree_util.tree_leaves_with_path(parts):
            sharding = getattr(x, "sharding", None)
            if sharding is None or len(sharding.device_set) == 1:
                continue
            if not is_on_mesh(sharding, self._mesh):
                axes = dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else ""
                raise ValueError(
                    f"the state is on another mesh: {jax.tree_util.keystr(path)} is on "
                    f"{len(sharding.device_set)} devices {axes}, and the mesh of zero is "
                    f"{dict(self._mesh.shape)}. Create the state with this zero.init, or move it "
                    "to the host first (jax.device_get)."
                )


def is_on_mesh(sharding: object, mesh: Mesh) -> bool:
    """Returns whether a sharding is over the devices and axes of a mesh."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    return same_devices(layout.merge_axes(sharding.mesh), mesh)


def by_path(tree: PyTree, of: str = "") -> dict[str, object]:
    """Returns the leaves of a tree by their path, with a prefix."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{of}{jax.tree_util.keystr(path)}": x for path, x in leaves}


def _is_placed(x: Any, sharding: NamedSharding, leaf: Leaf) -> bool:
    """Returns whether an array already has the sharding, memory and place of its leaf."""
    if leaf.plain == isinstance(x, StoredArray):
        return False
    x = unwrap_stored(x)
    return (
        isinstance(getattr(x, "sharding", None), NamedSharding)  # not by TrainState.create
        # By ==, P("data") and P("data", None) would differ.
        and x.sharding.is_equivalent_to(sharding, x.ndim)
        and x.sharding.memory_kind == sharding.memory_kind
        and isinstance(x, DiskArray) == (leaf.place == DISK)
    )


def _copy(x: StateArray) -> jax.Array | np.ndarray:
    # device_put without a copy may share memory with an array on one of the devices.
    x = x.gathered() if isinstance(x, StoredArray) else x
    return x.copy() if isinstance(x, jax.Array) else np.asarray(x)
