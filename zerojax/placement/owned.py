"""The arrays that zerojax has made for a caller, which a step may take over."""

from __future__ import annotations

import weakref
from typing import Any

import jax


class OwnedArrays:
    """Arrays of states that carry no mark of zerojax, held by weak references."""

    def __init__(self) -> None:
        self._arrays = weakref.WeakValueDictionary[int, Any]()

    def add(self, tree: Any) -> None:
        """Notes the arrays of a state that a caller is given."""
        for x in jax.tree.leaves(tree):
            if isinstance(x, jax.Array):
                self._arrays[id(x)] = x

    def __contains__(self, x: Any) -> bool:
        return self._arrays.get(id(x)) is x
