"""The objects of a state among the results of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from zerojax.xla.types import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True)
class ObjectPlaceholder:
    """A placeholder in a function's results for an object of the state: an NNX object that was
    passed to the function, or the new state.

    Attributes:
      position: The object's position among the objects of the call.
    """

    position: int


def take_out(
    results: PyTree, matches: Sequence[Callable[[PyTree], bool]]
) -> tuple[dict[int, PyTree], PyTree]:
    """Takes the new state out of a step's results.

    Args:
      results: What the step returned.
      matches: For each object of the state, whether a node of the results is its new value.

    Returns:
      The new value of each object by its position, and the results with an
      :class:`ObjectPlaceholder` in its place. The search descends into tuples, lists and dicts, and
      takes for each object the first, outermost node that matches.

    Example:
      >>> found, rest = take_out(({"w": 1.0}, 2.0), [lambda x: isinstance(x, dict)])
      >>> found, rest
      ({0: {'w': 1.0}}, (ObjectPlaceholder(position=0), 2.0))
    """
    found: dict[int, PyTree] = {}

    def below(node: PyTree) -> PyTree:
        for i, is_new in enumerate(matches):
            if i not in found and is_new(node):
                found[i] = node
                return ObjectPlaceholder(i)
        if not isinstance(node, tuple | list | dict):  # unflattening a class may inspect its fields
            return node
        children, tree = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        return jax.tree.unflatten(tree, [below(child) for child in children])

    return found, below(results)


def put_back(results: PyTree, objects: Sequence[PyTree]) -> PyTree:
    """Replaces each :class:`ObjectPlaceholder` in the results by its object."""
    if isinstance(results, ObjectPlaceholder):
        return objects[results.position]
    if type(results) is tuple:
        return tuple([put_back(x, objects) for x in results])
    if isinstance(results, jax.Array):
        return results
    return jax.tree.map(
        lambda x: objects[x.position] if isinstance(x, ObjectPlaceholder) else x,
        results,
        is_leaf=lambda x: isinstance(x, ObjectPlaceholder),
    )


def beside(results: PyTree) -> PyTree:
    """Returns the results beside the state: the rest of a tuple, or the other element of a pair."""
    if isinstance(results, ObjectPlaceholder):
        return ()
    if type(results) is not tuple:
        return results
    others = tuple(x for x in results if not isinstance(x, ObjectPlaceholder))
    return others[0] if len(others) == 1 < len(results) else others


def summary(results: PyTree) -> str:
    """Describes the results of a step in a few words.

    Example:
      >>> summary(({"w": 1.0}, jax.numpy.zeros(())))
      'a tuple of dict, array'
    """

    def kind(x: object) -> str:
        return "array" if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else type(x).__name__

    if results is None:
        return "None"
    if isinstance(results, tuple):
        return f"a tuple of {', '.join(map(kind, results))}"
    return f"{'an' if kind(results) == 'array' else 'a'} {kind(results)}"
