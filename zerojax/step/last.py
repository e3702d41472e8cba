"""The recognition of the state that the last step left. A step that continues from this state has
nothing to check or move: the host only reads the state's fields."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.tree_util import PyTreeDef

from zerojax.train_state.nnx import graph_hash
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree

WriteBack = Callable[[Parts], None]
"""Writes the arrays after the step into the NNX objects of a state."""


class LastArrays:
    """Arguments that a step returned as its state, recognized by their arrays, which are not kept
    alive.

    Args:
      objects: The arguments.
      split: Splits such arguments into :class:`Parts`.
      own: The parts that zerojax keeps itself, by name.
    """

    def __init__(
        self, objects: tuple[PyTree, ...], split: Callable[..., Parts], own: dict[str, PyTree]
    ) -> None:
        leaves, tree = jax.tree.flatten(objects)
        self._tree: PyTreeDef = tree
        self._leaves = _references(leaves)
        self._own, self._split = own, split

    def recognize(self, objects: tuple[PyTree, ...]) -> tuple[Parts, None] | None:
        """Returns the state if ``objects`` have the arrays of the last step; else None."""
        leaves, tree = jax.tree.flatten(objects)
        if tree != self._tree:
            return None
        if not all(map(operator.is_, [reference() for reference in self._leaves], leaves)):
            return None
        return self._split(*objects)._replace(**self._own), None


def _references(leaves: list[object]) -> list[Callable[[], object]]:
    """Returns a weak reference to each leaf; a Python number cannot have one and is kept."""
    references: list[Callable[[], object]] = []
    for x in leaves:
        try:
            references.append(weakref.ref(x))
        except TypeError:
            references.append(partial(lambda x: x, x))
    return references


class LastObjects:
    """NNX objects as a step left them; neither objects nor arrays are kept alive.

    One walk over the objects detects changes: of the graph (types, attributes, variables and their
    metadata), and of the array of the last step in each variable.

    Args:
      graph: The objects' graph, from ``nnx.graph.flatten``.
      places: For each leaf of the parts, the position of its variable in that walk.
      parts: The arrays in the variables.
    """

    def __init__(self, graph: nnx.GraphDef[PyTree], places: list[int], parts: Parts) -> None:
        # With the hash, because an attribute that was changed in place still equals itself.
        self._graph, self._places = (graph_hash(graph), graph), places
        self._tree: PyTreeDef = jax.tree.structure(parts)
        self._arrays = [weakref.ref(x) for x in jax.tree.leaves(parts)]

    @classmethod
    def of(cls, objects: tuple[PyTree, ...], parts: Parts) -> LastObjects | None:
        """Returns the record of the objects; None unless they have exactly one variable for each
        array of the parts, and a graph with a hash."""
        graph, flat = nnx.graph.flatten(objects)
        if graph_hash(graph) is None or not all(isinstance(x, nnx.Variable) for x in flat.leaves):
            return None
        index_by_id = {id(x.get_raw_value()): i for i, x in enumerate(flat.leaves)}
        places = [index_by_id.pop(id(x), -1) for x in jax.tree.leaves(parts)]
        is_complete = len(places) == len(flat.leaves) and -1 not in places
        return cls(graph, places, parts) if is_complete else None

    def recognize(self, objects: tuple[PyTree, ...]) -> tuple[Parts, WriteBack] | None:
        """Returns the objects' arrays, and the function that replaces them; None if the objects are
        different, or have changed."""
        graph, flat = nnx.graph.flatten(objects)
        if (graph_hash(graph), graph) != self._graph:
            return None
        variables = [flat.leaves[i] for i in self._places]
        arrays = [variable.get_raw_value() for variable in variables]
        if any(reference() is not x for reference, x in zip(self._arrays, arrays, strict=True)):
            return None

        def write_back(parts: Parts) -> None:
            leaves = jax.tree.leaves(parts)
            for variable, x in zip(variables, leaves, strict=True):
                variable.set_raw_value(x)
            self._arrays = [weakref.ref(x) for x in leaves]

        return jax.tree.unflatten(self._tree, arrays), write_back
