"""A model's arrays by path: linen parameters, NNX states and modules, or any other pytree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.tree_util import GetAttrKey, keystr

from zerojax.xla.types import PyTree, Shaped


class OpenedModel(NamedTuple):
    """A model split into its arrays.

    Attributes:
      leaves: Its arrays by path (keys joined with ``/``), without those of random streams.
      close: Returns the model with the passed arrays, by path, in place of its own.
    """

    leaves: dict[str, Shaped]
    close: Callable[[Mapping[Any, object]], PyTree]


def open_tree(tree: PyTree) -> OpenedModel:
    """Splits a pytree or an NNX module into its arrays.

    Raises:
      TypeError: A leaf is neither an array nor a ``jax.ShapeDtypeStruct`` or the like.
      ValueError: The tree has no arrays.
    """
    if isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)
        opened = open_tree(state)
        return OpenedModel(opened.leaves, lambda arrays: nnx.merge(graph, opened.close(arrays)))
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_stream)
    paths = [None if _is_stream(leaf) else _path(keys) for keys, leaf in keyed]
    leaves = {path: leaf for path, (_, leaf) in zip(paths, keyed, strict=True) if path is not None}
    for path, leaf in leaves.items():
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{path or 'the tree'} is a {type(leaf).__name__}: pass a tree of arrays or "
                "jax.ShapeDtypeStruct, such as state.params, or an nnx.Module"
            )
    if not leaves:
        raise ValueError("the tree has no arrays: pass a model's parameters, such as state.params")

    def close(arrays: Mapping[Any, object]) -> object:
        new_leaves = (arrays.get(path, leaf) for path, (_, leaf) in zip(paths, keyed, strict=True))
        return jax.tree.unflatten(structure, new_leaves)

    return OpenedModel(leaves, close)


def _is_stream(x: object) -> bool:
    return isinstance(x, nnx.RngState)


def _path(keys: tuple[object, ...]) -> str:
    is_boxed = keys[-1:] == (GetAttrKey("value"),)  # flax's box of an array and its metadata
    return keystr(keys[:-1] if is_boxed else keys, simple=True, separator="/")
