"""Checks of the arguments of a generation, before anything is traced."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax.xla.types import PyTree


def require(holds: bool, name: str, value: object, requirement: str) -> None:
    """Raises ValueError for the value of an option unless its requirement holds."""
    if not holds:
        raise ValueError(f"{name} = {value!r} must be {requirement}")


def integer(name: str, value: Any) -> int:
    """Returns an integer of Python, NumPy or JAX as an int.

    Raises:
      TypeError: It is not an integer.

    >>> integer("top_k", np.int64(5))
    5
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} = {value!r} must be an integer") from None


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Returns an integer, or a sequence of them, as a tuple; None as an empty one.

    >>> integers("eos", 2), integers("eos", np.array([2, 3])), integers("eos", None)
    ((2,), (2, 3), ())
    """
    if values is None:
        return ()
    several = isinstance(values, list | tuple | set) or np.ndim(values) == 1
    return tuple(integer(name, x) for x in (values if several else [values]))


def number(name: str, value: Any) -> float:
    """Returns a finite number of Python, NumPy or JAX as a float.

    Raises:
      ValueError: It is not a finite number.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    is_number = not isinstance(value, str) and math.isfinite(found)
    require(is_number, name, value, "a finite number")
    return found


def check_key(key: Any) -> None:
    """Rejects a key from which JAX cannot draw.

    Raises:
      TypeError: It is not one key.
    """
    is_array = isinstance(key, jax.Array | np.ndarray)
    is_typed = is_array and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = is_array and key.dtype == jnp.uint32
    if not (is_typed and key.ndim == 0) and not (is_raw and key.ndim == 1):
        what = f"{key.dtype}{[*key.shape]}" if is_array else repr(key)
        raise TypeError(f"key = {what}: pass one key, as jax.random.key(seed)")


def check_dtype(dtype: DTypeLike | None) -> None:
    """Rejects a dtype that is not floating, or in which XLA does not compute whole models."""
    if dtype is None:
        return
    try:
        given = jnp.dtype(dtype)
    except TypeError:
        given = None
    if given is None or not jnp.issubdtype(given, jnp.floating) or given.itemsize < 2:
        raise ValueError(
            f"dtype = {getattr(given, 'name', repr(dtype))} must be floating and of 16 bits or "
            "more, as jax.numpy.bfloat16; zerojax.quantize_weights quantizes parameters"
        )


def check_params(given: PyTree, params: PyTree, model: object) -> None:
    """Rejects what is not a tree of parameters.

    Args:
      given: The argument of the user.
      params: The parameters in it.
      model: The linen model.

    Raises:
      TypeError: It has none.
    """
    if isinstance(params, Mapping) and jax.tree.leaves(params):
        return
    what = f"a {type(params).__name__}" if jax.tree.leaves(params) else "none"
    of = "" if given is params else f" in the {type(given).__name__}"
    raise TypeError(
        f"generate: params: {what}{of}, not parameters of {type(model).__name__}. Pass their dict, "
        '{"params": ...} with further collections, or a state with a field `params`'
    )


def check_values(**arguments: PyTree) -> None:
    """Rejects arguments with arrays that have no values.

    Raises:
      TypeError: An array is abstract or traced.
      ValueError: An array is deleted.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(arguments):
        where = f"generate: {path[0].key}{jax.tree_util.keystr(path[1:])}"
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{where} is traced: generate has its own jit; call it outside jit")
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"{where} is a jax.ShapeDtypeStruct, without values: pass arrays")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"{where} is deleted (donated to a step): pass what it returned")
