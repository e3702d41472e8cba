"""What the last step left, to tell that the next one goes on from there: then nothing has to be
checked or moved, and the host's work is that of reading the state's fields."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from zerojax.train_state.state_parts import Parts


class Recognized(NamedTuple):
    """A state where the last step left it.

    Attributes:
      parts: its arrays.
      write_back: gives NNX objects the arrays after the step; None for a state that is returned.
    """

    parts: Parts
    write_back: Callable[[Parts], None] | None


class LastState:
    """A ``TrainState`` that a step returned; it is not kept alive.

    Args:
      state: the one.
      split: takes it apart.
    """

    def __init__(self, state: Any, split: Callable[..., Parts]) -> None:
        self._state, self._split = weakref.ref(state), split

    def recognize(self, objects: tuple[Any, ...]) -> Recognized | None:
        """None where the objects are others."""
        return Recognized(self._split(*objects), None) if self._state() is objects[0] else None


class LastObjects:
    """NNX objects as a step left them; neither they nor their arrays are kept alive.

    One walk over the objects tells whether they are as they were: the same graph (types,
    attributes, variables and their metadata), and in each variable the array of the last step.

    Args:
      graph: of the objects, as ``nnx.graph.flatten`` has it.
      places: which variable of that walk has each leaf of the parts.
      parts: what the variables hold.
    """

    def __init__(self, graph: Any, places: list[int], parts: Parts) -> None:
        # With its hash: an attribute that was changed in place still equals itself.
        self._graph, self._places = (hash(graph), graph), places
        self._tree: Any = jax.tree.structure(parts)
        self._arrays = [weakref.ref(x) for x in jax.tree.leaves(parts)]

    @classmethod
    def of(cls, objects: tuple[Any, ...], parts: Parts) -> LastObjects | None:
        """None unless each array of the parts is held by one variable, and no other is there."""
        graph, flat = nnx.graph.flatten(objects)
        if not all(isinstance(x, nnx.Variable) for x in flat.leaves):
            return None
        held = {id(x.get_raw_value()): i for i, x in enumerate(flat.leaves)}
        places = [held.pop(id(x), -1) for x in jax.tree.leaves(parts)]
        whole = len(places) == len(flat.leaves) and -1 not in places
        return cls(graph, places, parts) if whole else None

    def recognize(self, objects: tuple[Any, ...]) -> Recognized | None:
        """None where the objects are others, or something of them has changed."""
        graph, flat = nnx.graph.flatten(objects)
        if (hash(graph), graph) != self._graph:
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
