"""A step's further arguments: arrays are traced, everything else is part of the program."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np


class Static(NamedTuple):
    """What of the arguments is not an array; hashable, so that jit can key on it."""

    tree: Any
    values: tuple[Any, ...]


class _Array:
    """Stands where an array was taken out."""

    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


def divide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Static]:
    """Takes arrays and numbers out. A bool, a string, a type or a config stays as it is.

    Raises:
      TypeError: what stays is not hashable.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    arrays, values = [], []
    for path, x in leaves:
        if is_array(x):
            arrays.append(x)
            values.append(_ARRAY)
            continue
        try:
            hash(x)
        except TypeError:
            where = jax.tree_util.keystr(path[1:])
            raise TypeError(
                f"the further argument {where} is a {type(x).__name__}: no array, and not "
                "hashable, so that it cannot be part of the compiled step. Make it hashable (a "
                "frozen dataclass), or give it to the step by functools.partial."
            ) from None
        values.append(x)
    return arrays, Static(tree, tuple(values))


def join(arrays: list[Any], static: Static) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts the arguments together again."""
    left = iter(arrays)
    leaves = [next(left) if x is _ARRAY else x for x in static.values]
    return jax.tree.unflatten(static.tree, leaves)


def is_array(x: Any) -> bool:
    """Whether the step traces it: an array, abstract or not, or a number."""
    if isinstance(x, bool | str | type):
        return False
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return True
    # A config may have a dtype, and a dtype has a shape.
    return isinstance(x, int | float | complex) or (hasattr(x, "__array__") and hasattr(x, "dtype"))
