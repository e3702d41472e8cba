"""The arrays that zerojax created for a caller, and that a step may therefore donate."""

from __future__ import annotations

import weakref

import jax

from zerojax.xla.types import PyTree

_FEWEST = 1_000  # references between two searches for dead ones


class OwnedArrays:
    """Weak references to arrays of states that have no other mark of zerojax."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[jax.Array]] = {}
        self._limit = _FEWEST

    def add(self, tree: PyTree) -> None:
        """Records the arrays of a state that zerojax returns to a caller."""
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        self._references.update(zip(map(id, arrays), map(weakref.ref, arrays), strict=True))
        if len(self._references) > self._limit:
            alive = {key: ref for key, ref in self._references.items() if ref() is not None}
            self._references, self._limit = alive, _FEWEST + 2 * len(alive)

    def __contains__(self, x: object) -> bool:
        reference = self._references.get(id(x))
        return reference is not None and reference() is x
