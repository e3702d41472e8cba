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

Recognize = Callable[[tuple[PyTree, ...]], tuple[Parts, WriteBack | None] | None]
"""Returns the parts of the objects of a call, and the function that replaces the arrays of NNX
objects; None if the objects are not those that the last step left."""


def recognize_arrays(
    objects: tuple[PyTree, ...], split: Callable[..., Parts], own: dict[str, PyTree]
) -> Recognize:
    """Returns the recognition of arguments that a step returned as its state, by their arrays,
    which are not kept alive.

    Args:
      objects: The arguments.
      split: Splits such arguments into :class:`Parts`.
      own: The parts that zerojax keeps itself, by name.
    """
    structure: PyTreeDef = jax.tree.structure(objects)
    references = _references(jax.tree.leaves(objects))

    def recognize(objects: tuple[PyTree, ...]) -> tuple[Parts, None] | None:
        leaves, tree = jax.tree.flatten(objects)
        if tree != structure:
            return None
        if not all(map(operator.is_, [reference() for reference in references], leaves)):
            return None
        return split(*objects)._replace(**own), None

    return recognize


def _references(leaves: list[object]) -> list[Callable[[], object]]:
    """Returns a weak reference to each leaf; a Python number cannot have one and is kept."""
    references: list[Callable[[], object]] = []
    for x in leaves:
        try:
            references.append(weakref.ref(x))
        except TypeError:
            references.append(partial(lambda x: x, x))
    return references


def recognize_objects(objects: tuple[PyTree, ...], parts: Parts) -> Recognize | None:
    """Returns the recognition of NNX objects as a step left them; neither objects nor arrays are
    kept alive.

    One walk over the objects detects changes: of the graph (types, attributes, variables and their
    metadata), and of the array of the last step in each variable.

    Args:
      objects: The objects.
      parts: The arrays in their variables.

    Returns:
      None unless the objects have exactly one variable for each array of the parts, and a graph
      with a hash.
    """
    graph, flat = nnx.graph.flatten(objects)
    if graph_hash(graph) is None or not all(isinstance(x, nnx.Variable) for x in flat.leaves):
        return None
    index_by_id = {id(x.get_raw_value()): i for i, x in enumerate(flat.leaves)}
    # For each array, the position of its variable in the walk.
    places = [index_by_id.pop(id(x), -1) for x in jax.tree.leaves(parts)]
    if len(places) != len(flat.leaves) or -1 in places:
        return None
    # With the hash, because an attribute that was changed in place still equals itself.
    last_graph, tree = (graph_hash(graph), graph), jax.tree.structure(parts)
    references = [weakref.ref(x) for x in jax.tree.leaves(parts)]

    def recognize(objects: tuple[PyTree, ...]) -> tuple[Parts, WriteBack] | None:
        graph, flat = nnx.graph.flatten(objects)
        if (graph_hash(graph), graph) != last_graph:
            return None
        variables = [flat.leaves[i] for i in places]
        arrays = [variable.get_raw_value() for variable in variables]
        if any(reference() is not x for reference, x in zip(references, arrays, strict=True)):
            return None

        def write_back(parts: Parts) -> None:
            leaves = jax.tree.leaves(parts)
            for variable, x in zip(variables, leaves, strict=True):
                variable.set_raw_value(x)
            references[:] = [weakref.ref(x) for x in leaves]

        return jax.tree.unflatten(tree, arrays), write_back

    return recognize
