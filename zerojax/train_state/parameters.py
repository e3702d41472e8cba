"""The search for the parameters and the optimizer in a state that is any pytree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from zerojax.train_state.bound import has_inner
from zerojax.train_state.pytree import Parameters, are_given
from zerojax.xla.types import MaybeNone, PyTree

Select = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class _Placeholder:
    """A placeholder for a leaf of the state.

    Attributes:
      i: The leaf's position.
    """

    i: int


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
        count_text = f"there are {len(optimizers)}" if optimizers else "there is none"
        raise ValueError(
            f"{keys}: expected one state of an optimizer of zero.wrap(tx) or zero.optimizer() in "
            f"the training state, and {count_text}. Update all parameters with one such optimizer, "
            "or remove the keys from the config."
        )
    marked: PyTree = jax.tree.unflatten(
        tree,
        [_Placeholder(i) if given else None for i, given in enumerate(are_given(leaves, tree))],
    )
    state = marked[0] if len(objects) == 1 else marked
    if select is None:
        params = _like_moments(state, leaves, leaves[optimizers[0]].inner, keys)
    else:
        params = select(state)
    found, form = jax.tree.flatten(params)
    positions = [x.i for x in found if isinstance(x, _Placeholder)]
    if not found or len({*positions} - {*optimizers}) < len(found):
        raise ValueError(
            f"params= of zerojax.zero returned {params!r:.80}, which is not part of the state "
            f"({', '.join(type(x).__name__ for x in objects)}). Return the subtree with the "
            "parameters, as in params=lambda state: state[0]."
        )
    return Parameters(form, positions, *optimizers)


def _like_moments(state: PyTree, leaves: Sequence[PyTree], moments: PyTree, keys: str) -> PyTree:
    """Finds the only part of the state that has the form of the optimizer's largest moments."""

    def shapes(
        node: PyTree,
    ) -> tuple[jax.tree_util.PyTreeDef, tuple[tuple[int, ...], ...]] | MaybeNone:
        found, tree = jax.tree.flatten(node)
        arrays = [leaves[x.i] if isinstance(x, _Placeholder) else x for x in found]
        return None if any(map(has_inner, arrays)) else (tree, tuple(map(np.shape, arrays)))

    parts = defaultdict(list)
    for path, node in _nodes((), state):
        parts[shapes(node)].append((path, node))
    forms = [shapes(node) for _, node in _nodes((), moments)]
    forms = [form for form in forms if form in parts and any(map(np.size, form[1]))]
    found = parts[max(forms, key=lambda form: len(form[1]))] if forms else []
    if len(found) == 1:
        return found[0][1]
    several = ", ".join(f"state{jax.tree_util.keystr(path)}" for path, _ in found[:4])
    raise ValueError(
        f"{keys}: zerojax must know the parameters of the state. "
        + (
            f"{several} have the form of the optimizer's moments."
            if found
            else "No part of the state has the form of the optimizer's moments."
        )
        + " Pass zerojax.zero(params=lambda state: state[0]), a function from the state to its "
        "parameters."
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
