"""The arrays that zerojax created for a caller, and that a step may therefore donate."""

from __future__ import annotations

import weakref

import jax

from zerojax.xla.types import PyTree


class OwnedArrays:
    """Weak references to arrays of states that have no other mark of zerojax."""

    def __init__(self) -> None:
        self._arrays = weakref.WeakValueDictionary[int, jax.Array]()

    def add(self, tree: PyTree) -> None:
        """Records the arrays of a state that zerojax returns to a caller."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array):
                self._arrays[id(x)] = x

    def __contains__(self, x: object) -> bool:
        return self._arrays.get(id(x)) is x
