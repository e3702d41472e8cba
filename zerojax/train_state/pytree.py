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
    which of them are parameters shows in the step alone. Other leaves, such as a module's
    functions, are part of the program, and beside functions Python numbers are too.

    Raises:
      TypeError: The objects have no arrays, or a leaf that is none and not hashable.
    """
    leaves = jax.tree_util.tree_leaves_with_path(objects)
    is_given = [given for x in objects for given in are_arrays(x)]
    kinds = ", ".join(type(x).__name__ for x in objects)
    if not any(is_given):
        raise TypeError(f"the state ({kinds}) has no arrays: a state is a pytree of arrays.")
    others = [leaf for (_, leaf), given in zip(leaves, is_given, strict=True) if not given]
    for path, leaf in leaves:
        if not is_array(leaf) and getattr(leaf, "__hash__", None) is None:
            raise TypeError(
                f"the state ({kinds}) has a {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path)}, which is no array and not hashable: keep it out of "
                "the state (a static field, or the step's closure)."
            )
    names = [_ONE if len(objects) == 1 else f"{_ONE}[{i}]" for i in range(len(objects))]
    tree: Any = jax.tree.structure(objects)

    def split(*objects: Any) -> Parts:
        pairs = zip(tree.flatten_up_to(objects), is_given, strict=True)
        arrays = jax.tree.unflatten(tree, [x if given else None for x, given in pairs])
        return Parts(
            {}, optax.EmptyState(), jnp.zeros((), jnp.int32), dict(zip(names, arrays, strict=True))
        )

    def close(parts: Parts, tx: Any) -> tuple[Any, ...]:
        arrays = tuple(parts.rest[name] for name in names)
        if not others:
            return arrays
        left = iter(others)
        merged = [next(left) if x is None else x for x in tree.flatten_up_to(arrays)]
        closed: tuple[Any, ...] = jax.tree.unflatten(tree, merged)
        return closed

    return OpenedState(
        parts=split(*objects),
        tx=_NOTHING,
        split=split,
        close=close,
        key=(tree, *others),
        specs=(),
        matches=[_same_form(form_of(x)) for x in objects],
        any_pytree=True,
    )


def _same_form(form: Any) -> Callable[[Any], bool]:
    return lambda x: bool(form_of(x) == form)


def are_arrays(tree: Any) -> list[bool]:
    """For each leaf of an argument, whether it is an array for the step. Beside functions, as in a
    module that is a pytree, a Python number is a setting of the program."""
    leaves = jax.tree.leaves(tree)
    settings = (int, float, complex) if not all(map(is_array, leaves)) else ()
    return [is_array(x) and not isinstance(x, settings) for x in leaves]


def is_array(x: Any) -> bool:
    """Whether a leaf of a state is an array or a number."""
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


def form_of(value: Any) -> tuple[Any, list[Any]]:
    """The tree, shapes and dtypes of a value, to be compared."""
    leaves, tree = jax.tree.flatten(value)
    return tree, [_shape(x) for x in leaves]


def _shape(x: Any) -> tuple[tuple[int, ...], Any]:
    if not is_array(x):
        return (), x
    dtype = jnp.result_type(x)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return np.shape(x), dtype
    return np.shape(x), jax.dtypes.canonicalize_dtype(dtype)
