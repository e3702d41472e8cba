"""The recognition of the state that the last step left. A step that continues from this state has
nothing to check or move: the host compares arrays by identity."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax

from zerojax.train_state.nnx import is_nnx
from zerojax.train_state.nnx_graph import Graph, set_raw_values
from zerojax.train_state.state_parts import FlatParts
from zerojax.xla.types import PyTree

Write = Callable[[Sequence[Any]], tuple[PyTree, ...]]
"""Returns the objects of a state with other arrays as their leaves."""

Read = Callable[[tuple[PyTree, ...]], tuple[list[Any], Write] | None]
"""Returns the leaves of a state's objects and :data:`Write`; None for another structure."""

Continue = Callable[[FlatParts], tuple[PyTree, ...] | None]
"""Returns the objects of a state with the arrays after a step, by which the next step recognizes
them; None if the arrays are not in the form of those before."""


class LastState:
    """The state that the last step left, recognized by its arrays. Neither its objects nor its
    arrays are kept alive, except for those that zerojax keeps itself.

    Args:
      read: Reads the leaves of objects like the state's.
      objects: The state.
      leaves: The leaves of the objects, followed by the arrays that zerojax keeps itself.
      flat: The arrays of the state.
      places: For each array of the state, its position in ``leaves``.
      own: The number of arrays that zerojax keeps itself.

    Attributes:
      references: Weak references to the arrays; empty for a ``TrainState``.
    """

    references: list[weakref.ref[Any]]

    def __init__(
        self,
        read: Read,
        objects: tuple[PyTree, ...],
        leaves: Sequence[Any],
        flat: FlatParts,
        places: Sequence[int],
        own: int,
    ) -> None:
        self._read, self._tree = read, flat.tree
        # Leaves that are part of the program, such as the functions of a module.
        constants = sorted({*range(len(leaves))}.difference(places))
        self._constants = [leaves[i] for i in constants]
        places = [*places, *constants]
        self._in_flat = _picker(places)
        in_order = sorted(range(len(places)), key=places.__getitem__)
        first = len(leaves) - own
        self._in_objects, self._in_own = _picker(in_order[:first]), _picker(in_order[first:])
        self._own = leaves[first:]
        self._remember(objects, flat.leaves)

    @classmethod
    def of(
        cls, objects: tuple[PyTree, ...], flat: FlatParts, own: Mapping[str, PyTree]
    ) -> Self | None:
        """Returns the recognition of the objects of a state after a step.

        Args:
          objects: The objects.
          flat: The arrays of the state.
          own: The parts that zerojax keeps itself, by name.

        Returns:
          None unless each array is one leaf of the objects or of ``own``.
        """
        read = _reader(objects)
        found = None if read is None else read(objects)
        if read is None or found is None:
            return None
        own_leaves, places = jax.tree.leaves(own), dict[int, int]()
        leaves, ids = [*found[0], *own_leaves], {id(x) for x in flat.leaves}
        for i, x in enumerate(leaves):
            if id(x) in ids and places.setdefault(id(x), i) != i:
                return None
        if len(places) != len(flat.leaves):
            return None
        return cls(
            read, objects, leaves, flat, [places[id(x)] for x in flat.leaves], len(own_leaves)
        )

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        """Returns the arrays of the objects of a call; None if the last step did not leave them."""
        found = self._read(objects)
        if found is None:
            return None
        leaves, write = found
        leaves += self._own
        arrays = self._in_flat(leaves)
        if constants := self._constants:
            count = len(arrays) - len(constants)
            if not all(map(operator.is_, arrays[count:], constants)):
                return None
            arrays = arrays[:count]
        if not all(map(operator.is_, self._arrays(), arrays)):
            return None

        def after(flat: FlatParts) -> tuple[PyTree, ...] | None:
            if flat.tree != self._tree:
                return None
            leaves = [*flat.leaves, *self._constants]
            self._own = self._in_own(leaves)
            objects = write(self._in_objects(leaves))
            self._remember(objects, flat.leaves)
            return objects

        return FlatParts(arrays, self._tree), after

    def _remember(self, objects: tuple[PyTree, ...], arrays: Sequence[Any]) -> None:
        self._arrays: Callable[[], Iterable[Any]]
        if self._own or is_nnx(objects[0]):  # no TrainState
            # Tuples and dicts cannot be referred to weakly, and NNX objects outlive their arrays.
            self.references = [*map(weakref.ref, arrays)]
            self._arrays = functools.partial(map, operator.call, self.references)
            return
        # One weak reference, to the state, in place of one for each array.
        kept = [arrays]
        reference = weakref.ref(objects[0], lambda _: kept.clear())
        # The closure keeps the weak reference alive, without which its callback would not run.
        self._arrays = lambda: kept[0] if kept and reference else itertools.repeat(None)
        self.references = []


def _reader(objects: tuple[PyTree, ...]) -> Read | None:
    """Returns :data:`Read` for objects like these; None for NNX objects that cannot be compared."""
    if any(map(is_nnx, objects)):
        graph = Graph.of(objects)
        return None if graph is None else functools.partial(_read_variables, graph)
    return functools.partial(_read_leaves, jax.tree.structure(objects))


def _read_leaves(
    structure: jax.tree_util.PyTreeDef, objects: tuple[PyTree, ...]
) -> tuple[list[Any], Write] | None:
    leaves, found = jax.tree_util.tree_flatten(objects)
    return (leaves, structure.unflatten) if found == structure else None


def _read_variables(graph: Graph, objects: tuple[PyTree, ...]) -> tuple[list[Any], Write] | None:
    variables = graph.variables(objects)
    if variables is None:
        return None

    def write(leaves: Sequence[Any]) -> tuple[PyTree, ...]:
        set_raw_values(variables, leaves)
        return objects

    return [x.get_raw_value() for x in variables], write


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks the elements at these positions."""
    # In C, so that a call does no Python work for each leaf; of one position it is no sequence.
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: [values[i] for i in positions]
