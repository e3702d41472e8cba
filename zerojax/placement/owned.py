"""The arrays that zerojax created for a caller, and that a step may therefore donate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.xla.types import PyTree

_FEWEST = 1_000  # references between two searches for dead ones


class OwnedArrays:
    """Weak references to arrays of states that have no other mark of zerojax."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._limit = _FEWEST

    def add(self, tree: PyTree) -> None:
        """Records the arrays of a state that zerojax returns to a caller."""
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        self.extend([*map(weakref.ref, arrays)])

    def extend(self, references: Sequence[weakref.ref[Any]]) -> None:
        """Records arrays by weak references to them."""
        self._references += references
        if len(self._references) > self._limit:
            self._references = [ref for ref in self._references if ref() is not None]
            self._limit = _FEWEST + 2 * len(self._references)

    def ids(self) -> set[int]:
        """Returns the ``id`` of each array."""
        return {id(x) for ref in self._references if (x := ref()) is not None}
