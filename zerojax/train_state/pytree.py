"""Any pytree as a training state: nothing is known of it but what comes back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.train_state.state_parts import OpenedState, Parts

_ONE = "state"
_NOTHING = optax.identity()
"""The optimizer of a state whose updates are the step's own."""


def open_pytree(objects: tuple[Any, ...]) -> OpenedState:
    """Takes arguments of a step that are its state apart: all their arrays are ``Parts.rest``, for
    which of them are parameters shows in the step alone.

    Raises:
      TypeError: An object has no arrays, or a leaf that is none.
    """
    for i, x in enumerate(objects):
        leaves = jax.tree_util.tree_leaves_with_path(x)
        other = [(path, leaf) for path, leaf in leaves if not is_array(leaf)]
        if other or not leaves:
            what = "no arrays"
            if other:
                path, leaf = other[0]
                what = f"a {type(leaf).__name__} at {jax.tree_util.keystr(path) or 'its root'}"
            raise TypeError(
                f"object {i} of the state, a {type(x).__name__}, has {what}: a state is a pytree "
                "of arrays. Keep other values out of it (a static field, or the step's closure)."
            )
    names = [_ONE if len(objects) == 1 else f"{_ONE}[{i}]" for i in range(len(objects))]

    def split(*objects: Any) -> Parts:
        return Parts(
            {}, optax.EmptyState(), jnp.zeros((), jnp.int32), dict(zip(names, objects, strict=True))
        )

    def close(parts: Parts, tx: Any) -> tuple[Any, ...]:
        return tuple(parts.rest[name] for name in names)

    return OpenedState(
        parts=split(*objects),
        tx=_NOTHING,
        split=split,
        close=close,
        key=jax.tree.structure(objects),
        specs=(),
        matches=[Like(x).matches for x in objects],
        any_pytree=True,
    )


def is_array(x: Any) -> bool:
    """Whether a leaf of a state is an array or a number."""
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


class Like:
    """Another value of the same tree, shapes and dtypes."""

    def __init__(self, value: Any) -> None:
        leaves, tree = jax.tree.flatten(value)
        self._tree: Any = tree
        self._shapes = [_shape(x) for x in leaves]

    def matches(self, value: Any) -> bool:
        leaves, tree = jax.tree.flatten(value)
        return bool(tree == self._tree) and [_shape(x) for x in leaves] == self._shapes


def _shape(x: Any) -> tuple[tuple[int, ...], Any]:
    return np.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)) if not hasattr(
        x, "dtype"
    ) else x.dtype
