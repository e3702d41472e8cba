"""The graph of NNX objects, remembered so that a later call can compare its objects with it.

``nnx.graph.flatten`` builds a new graph at each call, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple, Self

import jax
from flax import nnx
from flax.typing import HashableMapping

from zerojax.train_state.nnx import graph_hash, is_nnx
from zerojax.xla.types import PyTree

_IMMUTABLE = (int, float, str, type(None), FunctionType, type, HashableMapping)
"""Classes of common attributes. flax has the names of a module's arrays in a mapping."""


class _Node(NamedTuple):
    """A module, or a pytree of NNX objects such as an optimizer's state.

    Attributes:
      position: Its position among the values of the graph.
      kind: The class of a module; None for a pytree.
      form: The names of a module's attributes, or the structure of a pytree.
    """

    position: int
    kind: type | None
    form: object


class Graph:
    """The modules and variables of NNX objects, with the modules' attributes and the variables'
    metadata. Neither objects nor arrays are kept alive.

    The values of the graph are the objects, followed by the attributes of each module and the
    children of each pytree, in the order in which these nodes are found.

    Args:
      objects: The objects.
    """

    def __init__(self, objects: tuple[PyTree, ...]) -> None:
        self._count = len(objects)
        self._nodes: list[_Node] = []
        self._again: list[tuple[int, int]] = []  # positions of one object
        self._variables: list[int] = []
        self._constants: list[tuple[int, object]] = []
        found: dict[int, int] = {}
        values = [*objects]
        for i, x in enumerate(values):  # grows
            if is_nnx(x) and id(x) in found:
                self._again.append((i, found[id(x)]))
            elif isinstance(x, nnx.Variable):
                self._variables.append(i)
            elif is_nnx(x) or _is_container(x):
                kind = type(x) if is_nnx(x) else None
                form, children = _open(x, kind, is_nnx)
                self._nodes.append(_Node(i, kind, form))
                values += children
            else:
                self._constants.append((i, x))
            found[id(x)] = i
        self._kinds = [type(values[i]) for i in self._variables]
        kinds = {type(x) for x in values if is_nnx(x)}
        self._is_known: Callable[[object], bool] = lambda x: type(x) in kinds
        self._metadata = [values[i].get_metadata() for i in self._variables]
        metadata = chain.from_iterable(each.values() for each in self._metadata)
        constants = {id(x): x for x in (*(x for _, x in self._constants), *metadata)}
        # A value that was changed in place is still the same object.
        self._hashes = [
            (x, value)
            for x in constants.values()
            if not isinstance(x, _IMMUTABLE) and (value := graph_hash(x)) is not None
        ]

    @classmethod
    def of(cls, objects: tuple[PyTree, ...]) -> Self | None:
        """Returns the graph of objects; None if it has arrays outside of variables, or no hash."""
        definition, flat = nnx.graph.flatten(objects)
        are_variables = all(isinstance(x, nnx.Variable) for x in flat.leaves)
        if graph_hash(definition) is None or not are_variables:
            return None
        graph = cls(objects)
        variables = graph.variables(objects)
        # Nodes that another library has registered may have variables, too.
        is_complete = variables and {*map(id, variables)} == {*map(id, flat.leaves)}
        return graph if is_complete else None

    def variables(self, objects: tuple[PyTree, ...]) -> list[nnx.Variable[Any]] | None:
        """Returns the variables of objects; None if the objects have another graph."""
        if len(objects) != self._count:
            return None
        values = [*objects]
        for position, kind, form in self._nodes:
            x = values[position]
            if kind is not None and kind is not type(x):
                return None
            own_form, children = _open(x, kind, self._is_known)
            if own_form != form:
                return None
            values += children
        variables = [values[i] for i in self._variables]
        is_unchanged = (
            all(_same(values[i], x) for i, x in self._constants)
            and all(values[i] is values[j] for i, j in self._again)
            and [*map(type, variables)] == self._kinds
            and [x.get_metadata() for x in variables] == self._metadata
            and all(hash(x) == value for x, value in self._hashes)
        )
        return variables if is_unchanged else None


def set_raw_values(variables: Sequence[nnx.Variable[Any]], values: Sequence[object]) -> None:
    """Replaces the values of variables, outside of any trace: ``set_raw_value`` would check that
    twice, which takes ten times as long."""
    write: Callable[[object, object], None] = vars(nnx.Variable)["_raw_value"].__set__
    for variable, x in zip(variables, values, strict=True):
        try:
            write(variable, x)
        except TypeError:  # a mutable array of its own kind
            variable.set_raw_value(x)


def _same(x: object, y: object) -> bool:
    return x is y or (type(x) is type(y) and bool(x == y))


def _is_container(x: object) -> bool:
    """Returns whether a value is a pytree of NNX objects, or one that may be changed in place."""
    if jax.tree_util.all_leaves([x]):
        return False
    return any(map(is_nnx, jax.tree.leaves(x, is_leaf=is_nnx))) or graph_hash(x) is None


def _open(
    node: Any, kind: type | None, is_object: Callable[[object], bool]
) -> tuple[object, Iterable[PyTree]]:
    """Returns the form of a module, or of a pytree of objects, and its attributes or children."""
    if kind is not None:
        attributes = vars(node)
        return tuple(attributes), attributes.values()
    children, tree = jax.tree.flatten(node, is_leaf=is_object)
    return tree, children
