"""A training state split into parts: the form that the rest of zerojax works on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from zerojax.xla.types import PyTree

IDENTITY = optax.identity()
"""The optimizer of a state that the step updates itself, or that is only read; one object, because
programs are cached by their optimizer."""

STATE_KEY = "state"
"""The key in ``Parts.rest`` of the arrays of a state of which the parameters are not known."""


class Parts(NamedTuple):
    """The arrays of a training state.

    Attributes:
      params: The parameters that the optimizer updates; an empty dict if they are not known.
      opt_state: The optimizer's state.
      step: int [], the user's step counter; for a state that is any pytree a counter of zerojax's,
        which is 0 in a state that is opened.
      rest: All other arrays that a step passes to the next (batch statistics, PRNG keys, an average
        of the parameters), by name.
    """

    params: PyTree
    opt_state: PyTree
    step: PyTree
    rest: dict[str, PyTree]


@dataclass(frozen=True, eq=False, slots=True)
class PartsTree:
    """``jax.tree.structure`` of :class:`Parts`. A call compares it with the one of the last call,
    which is the same object.

    Attributes:
      structure: The structure.
    """

    structure: jax.tree_util.PyTreeDef

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, PartsTree) and bool(self.structure == other.structure)
        )

    def __hash__(self) -> int:
        return hash(self.structure)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(eq=False, slots=True)
class FlatParts:
    """The arrays of a training state as a list, which JAX passes to a program and returns from it
    faster than a tree.

    Attributes:
      leaves: The leaves of the :class:`Parts`, in their order.
      tree: The structure of the :class:`Parts`.
    """

    leaves: Sequence[Any]
    tree: PartsTree

    @classmethod
    def of(cls, parts: Parts) -> FlatParts:
        """Flattens the parts of a state."""
        leaves, structure = jax.tree.flatten(parts)
        return cls(leaves, PartsTree(structure))

    def like(self, other: FlatParts) -> FlatParts:
        """Returns these arrays with the ``tree`` of another state, if the trees are equal."""
        return FlatParts(self.leaves, other.tree if self.tree == other.tree else self.tree)

    def parts(self) -> Parts:
        """Rebuilds the parts."""
        parts: Parts = jax.tree.unflatten(self.tree.structure, self.leaves)
        return parts

    def tree_flatten(self) -> tuple[Sequence[Any], PartsTree]:
        return self.leaves, self.tree

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], PartsTree]:
        pairs = jax.tree_util.tree_leaves_with_path(self.parts())
        # JAX names an array by its path within the Parts, with one dot in front of an attribute.
        return [(GetAttrKey(keystr(path).removeprefix(".")), x) for path, x in pairs], self.tree

    @classmethod
    def tree_unflatten(cls, tree: PartsTree, leaves: Sequence[Any]) -> FlatParts:
        return cls(leaves, tree)


def spread_specs(
    specs: Sequence[PartitionSpec | None], parameters: Sequence[PyTree]
) -> tuple[PartitionSpec | None, ...]:
    """Returns the spec of each array from the spec of each subtree of the parameters. The scales of
    a quantized parameter have no axis for a dimension with one scale."""

    def fitting(spec: PartitionSpec | None, x: Any) -> PartitionSpec | None:
        if spec is None:
            return None
        sizes = zip(spec, np.shape(x), strict=False)
        return PartitionSpec(*(None if size == 1 else entry for entry, size in sizes))

    return tuple(
        fitting(spec, x)
        for spec, parameter in zip(specs, parameters, strict=True)
        for x in jax.tree.leaves(parameter)
    )


@dataclass(frozen=True)
class StateKind:
    """The functions that split and rebuild states of one kind. They keep no array of a state.

    Attributes:
      key: A hashable value that differs between kinds.
      split: ``split(*objects)`` returns the arrays of a state, at the cost of reading its fields.
      close: ``close(parts, tx)`` returns the objects of a state with these arrays and this
        optimizer.
      write_back: ``write_back(objects, parts, tx)`` updates the user's objects in place, as NNX
        does; None for a state that is returned.
      matches: ``matches(objects)`` returns, for each object of a state, a test whether a node of a
        step's results is its new value; an empty sequence for objects that are updated in place.
      any_pytree: Whether a state is neither a ``TrainState`` nor a model with its optimizer. The
        caller owns the arrays that it puts into such a state.
      knows_parameters: Whether the parameters are known; if not, all arrays are in ``Parts.rest``,
        and the step updates them itself.
    """

    key: Hashable
    split: Callable[..., Parts]
    close: Callable[[Parts, optax.GradientTransformation], tuple[PyTree, ...]]
    write_back: Callable[[tuple[PyTree, ...], Parts, optax.GradientTransformation], None] | None = (
        None
    )
    matches: Callable[[tuple[PyTree, ...]], Sequence[Callable[[PyTree], bool]]] = lambda objects: ()
    any_pytree: bool = False
    knows_parameters: bool = True

    @property
    def optimizer_in_step(self) -> bool:
        """True if only the step has the optimizer that updates ``Parts.params``."""
        return self.any_pytree and self.knows_parameters


@dataclass(frozen=True)
class OpenedState:
    """A state split into parts.

    Attributes:
      kind: Rebuilds the state.
      parts: The state's arrays.
      tx: The state's optimizer.
      specs: The PartitionSpec that the user's model sets for each leaf of ``parts.params``, or of
        ``parts.rest`` if the parameters are not known, in order; None or empty if the model sets
        none.
      plain: Whether the state, a ``TrainState`` or NNX objects, has not been through zerojax yet,
        so that the caller owns its arrays; set by :meth:`zerojax.placement.states.States.open`.
    """

    kind: StateKind
    parts: Parts
    tx: optax.GradientTransformation
    specs: tuple[Any, ...] = ()
    plain: bool = False

    def close(self, parts: Parts) -> tuple[PyTree, ...]:
        """Returns the state's objects with other arrays."""
        return self.kind.close(parts, self.tx)
