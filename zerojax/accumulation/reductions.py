"""Reductions over rows: how the micro-batches' results combine to the global batch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Reduction(NamedTuple):
    """A reduction that may be computed from its results on parts of the rows.

    Attributes:
      primitive: The name of the primitive that computes the reduction.
      of_two: Function from the results of two parts to their joint result.
      over: ``over(x, axes)``, the joint result of all parts, whose results ``x`` holds along
        ``axes``.
      neutral: Function from a dtype to the value that changes no result, for rows that do not
        count.
    """

    primitive: str
    of_two: Callable[[jax.Array, jax.Array], jax.Array]
    over: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    neutral: Callable[[np.dtype], jax.typing.ArrayLike]


def _lowest(dtype: np.dtype) -> jax.typing.ArrayLike:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: np.dtype) -> jax.typing.ArrayLike:
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _all_bits(dtype: np.dtype) -> jax.typing.ArrayLike:
    # -1 becomes the largest unsigned integer, and True.
    return np.array(-1).astype(dtype)


REDUCTIONS: Mapping[str, Reduction] = {
    "sum": Reduction("reduce_sum", jnp.add, lax.reduce_sum, lambda _: 0),
    "max": Reduction("reduce_max", jnp.maximum, lax.reduce_max, _lowest),
    "min": Reduction("reduce_min", jnp.minimum, lax.reduce_min, _highest),
    "prod": Reduction("reduce_prod", jnp.multiply, lax.reduce_prod, lambda _: 1),
    "and": Reduction("reduce_and", jnp.bitwise_and, lax.reduce_and, _all_bits),
    "or": Reduction("reduce_or", jnp.bitwise_or, lax.reduce_or, lambda _: 0),
}
"""Reductions by their name in :class:`zerojax.accumulation.kinds.RowKind`."""

REDUCES: Mapping[str, str] = {x.primitive: name for name, x in REDUCTIONS.items()}
"""The name of each primitive's reduction."""
