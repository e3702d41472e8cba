"""Any pytree as a training state: nothing is known of it but what comes back."""

from __future__ import annotations

from collections.abc import Callable
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
      TypeError: The objects have no arrays, or a leaf that is none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(objects)
    other = [(path, leaf) for path, leaf in leaves if not is_array(leaf)]
    if other or not leaves:
        what = "no arrays"
        if other:
            path, leaf = other[0]
            what = f"a {type(leaf).__name__} at {jax.tree_util.keystr(path)}"
        raise TypeError(
            f"the state ({', '.join(type(x).__name__ for x in objects)}) has {what}: a state is a "
            "pytree of arrays. Keep other values out of it (a static field, or the step's closure)."
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
        matches=[_same_form(form_of(x)) for x in objects],
        any_pytree=True,
    )


def _same_form(form: Any) -> Callable[[Any], bool]:
    return lambda x: bool(form_of(x) == form)


def is_array(x: Any) -> bool:
    """Whether a leaf of a state is an array or a number."""
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


def form_of(value: Any) -> tuple[Any, list[Any]]:
    """The tree, shapes and dtypes of a value, to be compared."""
    leaves, tree = jax.tree.flatten(value)
    return tree, [_shape(x) for x in leaves]


def _shape(x: Any) -> tuple[tuple[int, ...], Any]:
    if not is_array(x):
        return (), type(x)
    dtype = jnp.result_type(x)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return np.shape(x), dtype
    return np.shape(x), jax.dtypes.canonicalize_dtype(dtype)
