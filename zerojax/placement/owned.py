"""The arrays that zerojax created for a caller, and that a step may therefore donate."""

from __future__ import annotations

import weakref
from typing import Any

import jax


class OwnedArrays:
    """Weak references to arrays of states that have no other mark of zerojax."""

    def __init__(self) -> None:
        self._arrays = weakref.WeakValueDictionary[int, Any]()

    def add(self, tree: Any) -> None:
        """Records the arrays of a state that zerojax returns to a caller."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array):
                self._arrays[id(x)] = x

    def __contains__(self, x: Any) -> bool:
        return self._arrays.get(id(x)) is x
