"""The recognition of the state that the last step left. A step that continues from this state has
nothing to check or move: the host compares objects by identity."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

from zerojax.train_state.nnx_graph import Graph, set_raw_values
from zerojax.train_state.state_parts import FlatParts
from zerojax.xla.types import PyTree

Continue = Callable[[FlatParts], tuple[PyTree, ...] | None]
"""Returns the objects of a state with the arrays after a step, by which the next step recognizes
them; None if the arrays are not in the form of those before."""


class LastState(Protocol):
    """The state that the last step left. Neither its objects nor its arrays are kept alive.

    Attributes:
      references: Weak references to the arrays; empty for a ``TrainState``.
    """

    references: list[weakref.ref[Any]]

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        """Returns the arrays of the objects of a call; None if the last step did not leave them."""


class ReturnedState:
    """A state that a step returned, recognized by its arrays.

    Args:
      objects: The state.
      flat: The arrays of the state.
      places: For each array, its position among the leaves of the objects and ``own``.
      own: The arrays that zerojax keeps itself; none for a ``TrainState``.
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
        self._tree, self._own = flat.tree, own
        # Leaves that are part of the program, such as the functions of a module.
        constants = sorted({*range(len(leaves))}.difference(places))
        self._constants = [leaves[i] for i in constants]
        places = [*places, *constants]
        self._in_flat = _picker(places)
        in_order = sorted(range(len(places)), key=places.__getitem__)
        self._in_objects = _picker(in_order[: len(leaves)])
        self._in_own = _picker(in_order[len(leaves) :])
        self._remember(objects, flat.leaves)

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        leaves, structure = jax.tree_util.tree_flatten(objects)
        if self._structure != structure:
            return None
        leaves += self._own
        arrays = self._in_flat(leaves)
        if constants := self._constants:
            count = len(arrays) - len(constants)
            if not all(map(operator.is_, arrays[count:], constants)):
                return None
            arrays = arrays[:count]
        if not all(map(operator.is_, self._arrays(), arrays)):
            return None
        return FlatParts(arrays, self._tree), self._after

    def _after(self, flat: FlatParts) -> tuple[PyTree, ...] | None:
        if flat.tree != self._tree:
            return None
        leaves = [*flat.leaves, *self._constants]
        self._own = self._in_own(leaves)
        objects: tuple[PyTree, ...] = jax.tree_util.tree_unflatten(
            self._structure, self._in_objects(leaves)
        )
        self._remember(objects, flat.leaves)
        return objects

    def _remember(self, objects: tuple[PyTree, ...], arrays: Sequence[Any]) -> None:
        """Keeps the arrays of a ``TrainState`` for as long as that object lives, and weak
        references to the arrays of other states: tuples and dicts cannot be referred to weakly."""
        self._arrays: Callable[[], Iterable[Any]]
        if not self._own:
            self.references, self._arrays = [], _held(objects[0], arrays)
            return
        self.references = _references(arrays)
        self._arrays = functools.partial(map, operator.call, self.references)


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
      places: For each array in a variable, the position of its variable in the graph.
      own: The number of arrays in front of these, which zerojax keeps itself.
    """

    def __init__(self, graph: Graph, flat: FlatParts, places: Sequence[int], own: int) -> None:
        self._graph, self._tree, self._places = graph, flat.tree, places
        self._own, self.references = flat.leaves[:own], _references(flat.leaves[own:])

    def find(self, objects: tuple[PyTree, ...]) -> tuple[FlatParts, Continue] | None:
        found = self._graph.variables(objects)
        if found is None:
            return None
        variables = [found[i] for i in self._places]
        arrays = [x.get_raw_value() for x in variables]
        if not _refer_to(self.references, arrays):
            return None

        def after(flat: FlatParts) -> tuple[PyTree, ...] | None:
            if flat.tree != self._tree:
                return None
            own = len(self._own)
            set_raw_values(variables, flat.leaves[own:])
            self._own, self.references = flat.leaves[:own], _references(flat.leaves[own:])
            return objects

        return FlatParts([*self._own, *arrays], self._tree), after


def updated_objects(
    objects: tuple[PyTree, ...], flat: FlatParts, own: int = 0
) -> UpdatedObjects | None:
    """Returns the recognition of NNX objects that a step updated.

    Args:
      objects: The objects.
      flat: ``own`` arrays that zerojax keeps itself, and the arrays in the objects' variables.

    Returns:
      None unless the objects have a :class:`Graph`, with exactly one variable for each array.
    """
    graph = Graph.of(objects)
    variables = None if graph is None else graph.variables(objects)
    if graph is None or variables is None:
        return None
    places = {id(x.get_raw_value()): i for i, x in enumerate(variables)}
    arrays = flat.leaves[own:]
    are_one_to_one = len(places) == len(variables) == len(arrays)
    if not are_one_to_one or places.keys() != {id(x) for x in arrays}:
        return None
    return UpdatedObjects(graph, flat, [places[id(x)] for x in arrays], own)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks the elements at these positions."""
    # In C, so that a call does no Python work for each leaf; of one position it is no sequence.
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: [values[i] for i in positions]


def _held(holder: object, arrays: Sequence[Any]) -> Callable[[], Iterable[Any]]:
    """Returns a function that returns arrays, or Nones once their holder is gone."""
    kept = [arrays]
    reference = weakref.ref(holder, lambda _: kept.clear())
    # The closure keeps the weak reference alive, without which its callback would not run.
    return lambda: kept[0] if kept and reference else itertools.repeat(None)


def _references(arrays: Sequence[Any]) -> list[weakref.ref[Any]]:
    return [*map(weakref.ref, arrays)]


def _refer_to(references: Sequence[weakref.ref[Any]], arrays: Sequence[Any]) -> bool:
    return all(map(operator.is_, map(operator.call, references), arrays))
