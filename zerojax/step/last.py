"""The recognition of the state that the last step left. A step that continues from this state has
nothing to check or move: the host compares objects by identity."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from zerojax.train_state.nnx_graph import Graph, set_raw_values
from zerojax.train_state.state_parts import FlatParts
from zerojax.xla.types import PyTree

Continue = Callable[[FlatParts], tuple[PyTree, ...] | None]
"""Returns the objects of a state with the arrays after a step, by which the next step recognizes
them; None if the arrays are not in the form of those before."""


class LastState(Protocol):
    """The state that the last step left. Neither its objects nor its arrays are kept alive."""

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        """Returns the arrays of the objects of a call; None if the last step did not leave them."""


class ReturnedState:
    """A state that a step returned, recognized by its arrays.

    Args:
      objects: The state.
      flat: The arrays of the state.
      places: For each array, its position among the leaves of the objects and ``own``.
      own: The arrays that zerojax keeps itself.
    """

    def __init__(
        self,
        objects: tuple[PyTree, ...],
        flat: FlatParts,
        places: Sequence[int],
        own: Sequence[jax.Array],
    ) -> None:
        self._structure: Any
        leaves, self._structure = jax.tree.flatten(objects)
        self._count, self._tree, self._places, self._own = len(leaves), flat.tree, places, own
        # Leaves that are part of the program, such as the functions of a module.
        self._constants = {i: leaves[i] for i in {*range(len(leaves))}.difference(places)}
        self._references = _references(flat.leaves)

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        leaves, structure = jax.tree.flatten(objects)
        if self._structure != structure:
            return None
        if any(leaves[i] is not x for i, x in self._constants.items()):
            return None
        leaves += self._own
        arrays = [leaves[i] for i in self._places]
        if not _refer_to(self._references, arrays):
            return None
        return FlatParts(arrays, self._tree), self._after

    def _after(self, flat: FlatParts) -> tuple[PyTree, ...] | None:
        if flat.tree != self._tree:
            return None
        leaves: list[Any] = [None] * (self._count + len(self._own))
        for i, x in zip(self._places, flat.leaves, strict=True):
            leaves[i] = x
        for i, x in self._constants.items():
            leaves[i] = x
        self._references, self._own = _references(flat.leaves), leaves[self._count :]
        objects: tuple[PyTree, ...] = jax.tree.unflatten(self._structure, leaves[: self._count])
        return objects


def returned_state(
    objects: tuple[PyTree, ...], flat: FlatParts, own: dict[str, PyTree]
) -> ReturnedState | None:
    """Returns the recognition of objects that a step returned as its state.

    Args:
      objects: The state.
      flat: The arrays of the state.
      own: The parts that zerojax keeps itself, by name.

    Returns:
      None unless each array is one leaf of the objects or of ``own``.
    """
    own_leaves, places = jax.tree.leaves(own), dict[int, int]()
    ids = {id(x) for x in flat.leaves}
    leaves = [*jax.tree.leaves(objects), *own_leaves]
    for i, x in enumerate(leaves):
        if id(x) in ids:
            if id(x) in places:
                return None
            places[id(x)] = i
    if len(places) != len(flat.leaves):
        return None
    return ReturnedState(objects, flat, [places[id(x)] for x in flat.leaves], own_leaves)


class UpdatedObjects:
    """NNX objects that a step updated, recognized by their graph and the arrays in their variables.

    Args:
      graph: The graph of the objects.
      flat: The arrays of the state.
      places: For each array, the position of its variable in the graph.
    """

    def __init__(self, graph: Graph, flat: FlatParts, places: Sequence[int]) -> None:
        self._graph, self._tree, self._places = graph, flat.tree, places
        self._references = _references(flat.leaves)

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        found = self._graph.variables(objects)
        if found is None:
            return None
        variables = [found[i] for i in self._places]
        arrays = [x.get_raw_value() for x in variables]
        if not _refer_to(self._references, arrays):
            return None

        def after(flat: FlatParts) -> tuple[PyTree, ...] | None:
            if flat.tree != self._tree:
                return None
            set_raw_values(variables, flat.leaves)
            self._references = _references(flat.leaves)
            return objects

        return FlatParts(arrays, self._tree), after


def updated_objects(objects: tuple[PyTree, ...], flat: FlatParts) -> UpdatedObjects | None:
    """Returns the recognition of NNX objects that a step updated.

    Args:
      objects: The objects.
      flat: The arrays in their variables.

    Returns:
      None unless the objects have a :class:`Graph`, with exactly one variable for each array.
    """
    graph = Graph.of(objects)
    variables = None if graph is None else graph.variables(objects)
    if graph is None or variables is None:
        return None
    places = {id(x.get_raw_value()): i for i, x in enumerate(variables)}
    are_one_to_one = len(places) == len(variables) == len(flat.leaves)
    if not are_one_to_one or places.keys() != {id(x) for x in flat.leaves}:
        return None
    return UpdatedObjects(graph, flat, [places[id(x)] for x in flat.leaves])


def _references(arrays: Sequence[Any]) -> list[weakref.ref[Any]]:
    return [*map(weakref.ref, arrays)]


def _refer_to(references: Sequence[weakref.ref[Any]], arrays: Sequence[Any]) -> bool:
    return all(map(operator.is_, map(operator.call, references), arrays))
