"""Any pytree as a training state, and the search for its parameters and optimizer."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from zerojax.train_state.bound import has_inner, is_optimizer_state
from zerojax.train_state.linen import own_specs
from zerojax.train_state.state_parts import IDENTITY, STATE_KEY, OpenedState, Parts, StateKind
from zerojax.xla.types import PyTree

Select = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class Parameters:
    """The parameters and the optimizer state among the leaves of a state.

    Attributes:
      tree: The parameters' tree.
      positions: The positions of the parameters among the leaves, in the order of their tree.
      opt_state: The position of the optimizer state, which counts as one leaf.
    """

    tree: jax.tree_util.PyTreeDef
    positions: Sequence[int]
    opt_state: int


@dataclass(frozen=True)
class _Placeholder:
    """A placeholder for a leaf of the state.

    Attributes:
      at: The leaf's position or path.
      shape: Its shape; None for the optimizer's state.
    """

    at: object
    shape: tuple[int, ...] | None


def find_parameters(objects: tuple[PyTree, ...], keys: str, select: Select | None) -> Parameters:
    """Finds the parameters of a state.

    Args:
      objects: The state, which contains one state of a wrapped optimizer.
      keys: The keys of the config that need the parameters, for messages.
      select: The user's function from the state to its parameters, which receives None in place of
        leaves that are not arrays. If None, the parameters are the only part of the state that has
        the form of the optimizer's moments.

    Raises:
      ValueError: The state has no optimizer state, or more than one; or the parameters cannot be
        found, or do not belong to this state.
    """
    leaves, tree = jax.tree.flatten(objects, is_leaf=has_inner)
    optimizers = [i for i, x in enumerate(leaves) if has_inner(x)]
    if len(optimizers) != 1:
        raise ValueError(
            f"{keys}: expected one state of an optimizer of zero.wrap(tx) or zero.optimizer() in "
            f"the training state, and there are {len(optimizers)}. Update all parameters with one "
            "such optimizer, or remove the keys from the config."
        )
    marked: PyTree = jax.tree.unflatten(tree, [
        _Placeholder(i, None if has_inner(x) else np.shape(x)) if given else None
        for i, (x, given) in enumerate(zip(leaves, are_given(leaves, tree), strict=True))
    ])  # fmt: skip
    state = marked[0] if len(objects) == 1 else marked
    moments = leaves[optimizers[0]].inner
    found, form = jax.tree.flatten(_selected(state, moments, keys, select))
    return Parameters(form, [x.at for x in found], *optimizers)


def specs_of_arrays(
    rest: dict[str, PyTree],
    select: Select | None,
    specs_of: Callable[[PyTree], Sequence[PartitionSpec | None]],
    *,
    read_only: bool,
) -> list[PartitionSpec | None]:
    """Returns the user's spec of each array of a state that the step updates itself.

    An array that has the shape and the last keys of a parameter, as moments and averages have them,
    has its spec.

    Args:
      rest: ``Parts.rest`` of the state.
      select: As for :func:`find_parameters`. If None, all arrays of a state of one object without
        an optimizer's state are parameters.
      specs_of: Returns the specs of the parameters that it is passed.
      read_only: Whether the state is an evaluation's, whose one object may be the parameters.

    Raises:
      ValueError: The parameters cannot be found.
    """
    arrays = dict(jax.tree_util.tree_leaves_with_path(rest))
    nodes = jax.tree.leaves(rest, is_leaf=is_optimizer_state)
    moments = [x for x in nodes if is_optimizer_state(x)]
    marked = jax.tree_util.tree_map_with_path(
        lambda path, x: _Placeholder(path, None if is_optimizer_state(x) else np.shape(x)),
        rest,
        is_leaf=is_optimizer_state,
    )
    first, *others = params = tuple(marked[name] for name in rest)
    params = params if others else first
    if moments or others or not (read_only or select is None):
        params = _selected(params, moments, "zerojax.zero(specs=...)", select)
    specs = specs_of(jax.tree.map(lambda x: arrays[x.at], params))
    own: dict[object, PartitionSpec | None] = {}
    for x, spec in zip(jax.tree.leaves(params), specs, strict=True):
        for i in range(len(x.at)):
            own.setdefault((x.at[i:], x.shape), spec)

    return [
        next((own[end] for i in range(len(path)) if (end := (path[i:], np.shape(x))) in own), None)
        for path, x in arrays.items()
    ]


def _selected(state: PyTree, moments: PyTree, keys: str, select: Select | None) -> PyTree:
    """Returns the placeholders of the parameters, by the user's function or by the moments."""
    params = _like_moments(state, moments, keys) if select is None else select(state)
    found = jax.tree.leaves(params)
    given = {x.at for x in found if isinstance(x, _Placeholder) and x.shape is not None}
    if not found or len(given) < len(found):
        raise ValueError(
            f"params= of zerojax.zero returned {params!r:.80}, which is not part of the state. "
            "Return the subtree with the parameters, as in params=lambda state: state[0]."
        )
    return params


def _like_moments(state: PyTree, moments: PyTree, keys: str) -> PyTree:
    """Finds the only part of the state that has the form of the optimizer's largest moments, if
    these are not masked: each mask shows a part of the parameters."""

    def shapes(node: PyTree) -> tuple[jax.tree_util.PyTreeDef, tuple[tuple[int, ...], ...]]:
        found, tree = jax.tree.flatten(node)
        return tree, tuple(map(np.shape, found))

    parts = defaultdict(list)
    for path, node in _nodes((), state):
        parts[shapes(node)].append((path, node))
    nodes = [node for _, node in _nodes((), moments)]
    is_masked = any(isinstance(node, optax.MaskedNode) for node in nodes)
    forms = [] if is_masked else [*map(shapes, nodes)]
    forms = [form for form in forms if form in parts and any(map(np.size, form[1]))]
    found = parts[max(forms, key=lambda form: len(form[1]))] if forms else []
    if len(found) == 1:
        return found[0][1]
    several = ", ".join(f"state{jax.tree_util.keystr(path)}" for path, _ in found[:4])
    raise ValueError(
        f"{keys}: zerojax must know the state's parameters. Parts with the form of the optimizer's "
        f"moments: {several or 'none'}. Pass zerojax.zero(params=lambda state: state[0])."
    )


def _nodes(
    path: jax.tree_util.KeyPath, node: PyTree
) -> Iterator[tuple[jax.tree_util.KeyPath, PyTree]]:
    """Yields all nodes of a tree with their paths, in pre-order."""
    yield path, node
    if jax.tree_util.all_leaves([node]):
        return
    for keys, child in jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node):
        yield from _nodes((*path, *keys), child)


def open_pytree(objects: tuple[PyTree, ...], parameters: Parameters | None = None) -> OpenedState:
    """Splits the arguments of a step that are its state into parts.

    Leaves that are not arrays, such as a module's functions, are part of the program; in an
    argument with such leaves Python numbers are too.

    Args:
      objects: The arguments.
      parameters: The positions of the parameters and of the optimizer's state. None puts all arrays
        into ``Parts.rest``: only the step knows which of them are parameters.

    Raises:
      TypeError: The objects have no arrays, or a leaf that is neither an array nor hashable.
    """
    nodes, structure = jax.tree.flatten(objects, is_leaf=has_inner if parameters else None)
    tree: Any = structure
    is_given = are_given(nodes, tree)
    kinds = ", ".join(type(x).__name__ for x in objects)
    if not any(is_given):
        raise TypeError(
            f"the state ({kinds}) has no arrays. Return a TrainState, or another pytree of arrays."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(objects):
        if not is_array(leaf) and getattr(leaf, "__hash__", None) is None:
            raise TypeError(
                f"the state ({kinds}) has a {type(leaf).__name__} at {jax.tree_util.keystr(path)}, "
                "which is neither an array nor hashable. Make it a static field, or close over it."
            )
    others = {i: x for i, (x, given) in enumerate(zip(nodes, is_given, strict=True)) if not given}
    known = [] if parameters is None else [*parameters.positions, parameters.opt_state]
    names = [STATE_KEY if len(objects) == 1 else f"{STATE_KEY}[{i}]" for i in range(len(objects))]

    def split(*objects: PyTree) -> Parts:
        values = tree.flatten_up_to(objects)
        known_leaves = [values[i] for i in known]
        for i in (*others, *known):
            values[i] = None
        rest = dict(zip(names, jax.tree.unflatten(tree, values), strict=True))
        step = jnp.zeros((), jnp.int32)
        if parameters is None:
            return Parts({}, optax.EmptyState(), step, rest)
        *params, opt_state = known_leaves
        return Parts(jax.tree.unflatten(parameters.tree, params), opt_state, step, rest)

    def close(parts: Parts, tx: optax.GradientTransformation) -> tuple[PyTree, ...]:
        rest = tuple(parts.rest[name] for name in names)
        if not others and parameters is None:
            return rest
        values = tree.flatten_up_to(rest)
        known_leaves = []
        if parameters is not None:
            known_leaves = [*parameters.tree.flatten_up_to(parts.params), parts.opt_state]
        for i, x in (*others.items(), *zip(known, known_leaves, strict=True)):
            values[i] = x
        closed: tuple[PyTree, ...] = jax.tree.unflatten(tree, values)
        return closed

    parts = split(*objects)
    kind = StateKind(
        (tree, *others.values(), *known),
        split,
        close,
        # A step that adds fp32 updates to 16-bit parameters returns wider parameters.
        matches=lambda state: [
            has_form(form_of(x, dtypes=parameters is None), dtypes=parameters is None)
            for x in state
        ],
        any_pytree=True,
        knows_parameters=parameters is not None,
    )
    specs = own_specs(parts.rest if parameters is None else parts.params)
    return OpenedState(kind, parts, IDENTITY, specs)


def has_form(
    form: tuple[jax.tree_util.PyTreeDef, list[object]], *, dtypes: bool = True
) -> Callable[[PyTree], bool]:
    """Returns a test for values of a form, as :func:`form_of` has it with or without ``dtypes``."""
    return lambda x: bool(form_of(x, dtypes=dtypes) == form)


def is_part(x: PyTree, objects: Sequence[PyTree]) -> bool:
    """Returns whether a container has the tree, shapes and dtypes of one of several objects, or of
    a part of one, as a target network has those of the parameters."""
    tree: jax.tree_util.PyTreeDef = jax.tree.structure(x)
    if jax.tree_util.treedef_is_leaf(tree):
        return False
    parts = [*objects]
    for parent in objects:
        parts += jax.tree.leaves(parent, is_leaf=functools.partial(operator.is_not, parent))
    alike = (part for part in parts if tree == jax.tree.structure(part))
    return any(form_of(part) == form_of(x) for part in alike)


def are_given(leaves: Sequence[object], tree: jax.tree_util.PyTreeDef) -> list[bool]:
    """Returns, for each leaf of several arguments, whether it is an array for the step; an
    optimizer's state that takes the place of a leaf counts as one."""
    plain = jax.tree.unflatten(tree, [np.zeros(()) if has_inner(x) else x for x in leaves])
    return [given for x in plain for given in are_arrays(x)]


def are_arrays(tree: PyTree) -> list[bool]:
    """Returns, for each leaf of an argument, whether it is an array for the step. Beside functions,
    as in a module that is a pytree, a Python number is a setting of the program."""
    leaves = jax.tree.leaves(tree)
    settings = (int, float, complex) if not all(map(is_array, leaves)) else ()
    return [is_array(x) and not isinstance(x, settings) for x in leaves]


def is_array(x: object) -> bool:
    """Returns whether a leaf of a state is an array or a number."""
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


def form_of(value: PyTree, *, dtypes: bool = True) -> tuple[jax.tree_util.PyTreeDef, list[object]]:
    """Returns the tree, shapes and, if ``dtypes``, dtypes of a value, for comparison."""
    leaves, tree = jax.tree.flatten(value)
    return tree, [
        (np.shape(x), jnp.result_type(x) if dtypes else None) if is_array(x) else x for x in leaves
    ]
