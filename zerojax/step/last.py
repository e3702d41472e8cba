"""The state as the last step left it. A step that goes on from there has nothing to check or move:
the host only reads the state's fields."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from zerojax.train_state.nnx import graph_hash
from zerojax.train_state.state_parts import Parts


class Recognized(NamedTuple):
    """A state where the last step left it.

    Attributes:
      parts: The state's arrays.
      write_back: Gives NNX objects the arrays after the step; None for a state that is returned.
    """

    parts: Parts
    write_back: Callable[[Parts], None] | None


class LastArrays:
    """Arguments that a step returned as its state, recognized by their arrays, which are not kept
    alive.

    Args:
      objects: The arguments.
      split: Takes such arguments apart.
      own: The parts that zerojax has beside them, by name.
    """

    def __init__(
        self, objects: tuple[Any, ...], split: Callable[..., Parts], own: dict[str, Any]
    ) -> None:
        leaves, tree = jax.tree.flatten(objects)
        self._tree: Any = tree
        self._leaves = _references(leaves)
        self._own, self._split = own, split

    def recognize(self, objects: tuple[Any, ...]) -> Recognized | None:
        """The state, if ``objects`` have the arrays of the last step; else None."""
        leaves, tree = jax.tree.flatten(objects)
        if tree != self._tree:
            return None
        if not all(map(operator.is_, [known() for known in self._leaves], leaves)):
            return None
        return Recognized(self._split(*objects)._replace(**self._own), None)


def _references(leaves: list[Any]) -> list[Callable[[], Any]]:
    """Weak references, by one Python call for all leaves; a Python number has none and is kept."""
    made: list[Callable[[], Any]] = []
    for x in leaves:
        try:
            made.append(weakref.ref(x))
        except TypeError:
            made.append(partial(lambda x: x, x))
    return made


class LastObjects:
    """NNX objects as a step left them; neither objects nor arrays are kept alive.

    One walk over the objects tells whether they have changed: the graph (types, attributes,
    variables and their metadata), and in each variable the array of the last step.

    Args:
      graph: The objects' graph, as ``nnx.graph.flatten`` makes it.
      places: For each leaf of the parts, the position of its variable in that walk.
      parts: The arrays in the variables.
    """

    def __init__(self, graph: Any, places: list[int], parts: Parts) -> None:
        # With its hash: an attribute that was changed in place still equals itself.
        self._graph, self._places = (graph_hash(graph), graph), places
        self._tree: Any = jax.tree.structure(parts)
        self._arrays = [weakref.ref(x) for x in jax.tree.leaves(parts)]

    @classmethod
    def of(cls, objects: tuple[Any, ...], parts: Parts) -> LastObjects | None:
        """None unless the objects have one variable for each array of the parts, and no other, and
        a graph with a hash."""
        graph, flat = nnx.graph.flatten(objects)
        if graph_hash(graph) is None or not all(isinstance(x, nnx.Variable) for x in flat.leaves):
            return None
        held = {id(x.get_raw_value()): i for i, x in enumerate(flat.leaves)}
        places = [held.pop(id(x), -1) for x in jax.tree.leaves(parts)]
        whole = len(places) == len(flat.leaves) and -1 not in places
        return cls(graph, places, parts) if whole else None

    def recognize(self, objects: tuple[Any, ...]) -> Recognized | None:
        """The objects' arrays; None where the objects are others, or have changed."""
        graph, flat = nnx.graph.flatten(objects)
        if (graph_hash(graph), graph) != self._graph:
            return None
        variables = [flat.leaves[i] for i in self._places]
        arrays = [variable.get_raw_value() for variable in variables]
        if any(known() is not x for known, x in zip(self._arrays, arrays, strict=True)):
            return None

        def write_back(parts: Parts) -> None:
            leaves = jax.tree.leaves(parts)
            for variable, x in zip(variables, leaves, strict=True):
                variable.set_raw_value(x)
            self._arrays = [weakref.ref(x) for x in leaves]

        return Recognized(jax.tree.unflatten(self._tree, arrays), write_back)
