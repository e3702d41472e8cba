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
    """Takes arrays and numbers out. A bool, a string or a function stays as it is in the step."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [_traced(x) for x in leaves]
    static = Static(tree, tuple(_ARRAY if t else x for x, t in zip(leaves, traced, strict=True)))
    return [x for x, t in zip(leaves, traced, strict=True) if t], static


def join(arrays: list[Any], static: Static) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts the arguments together again."""
    left = iter(arrays)
    leaves = [next(left) if x is _ARRAY else x for x in static.values]
    return jax.tree.unflatten(static.tree, leaves)


def _traced(x: Any) -> bool:
    if isinstance(x, bool | str):
        return False
    return hasattr(x, "dtype") or isinstance(x, int | float | complex | np.generic)
