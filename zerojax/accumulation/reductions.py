"""Reductions over rows: how the results of micro-batches make that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Reduction(NamedTuple):
    """A reduction that may be made part by part.

    Attributes:
      primitive: The name of the primitive that reduces an array so.
      of_two: The result of two parts together, from the results of each.
      over: ``over(x, axes)``, the result of all parts, of which ``x`` has those in some dimensions.
      neutral: By dtype, the value that changes no result; it stands for rows that do not count.
    """

    primitive: str
    of_two: Callable[[Any, Any], Any]
    over: Callable[[Any, tuple[int, ...]], Any]
    neutral: Callable[[Any], Any]


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _all_bits(dtype: Any) -> Any:
    return np.array(-1).astype(dtype)


REDUCTIONS: Mapping[str, Reduction] = {
    "sum": Reduction("reduce_sum", jnp.add, lax.reduce_sum, lambda _: 0),
    "max": Reduction("reduce_max", jnp.maximum, lax.reduce_max, _lowest),
    "min": Reduction("reduce_min", jnp.minimum, lax.reduce_min, _highest),
    "prod": Reduction("reduce_prod", jnp.multiply, lax.reduce_prod, lambda _: 1),
    "and": Reduction("reduce_and", jnp.bitwise_and, lax.reduce_and, _all_bits),
    "or": Reduction("reduce_or", jnp.bitwise_or, lax.reduce_or, lambda _: 0),
}
"""By the name that :class:`zerojax.accumulation.kinds.RowKind` has for them."""

REDUCES: Mapping[str, str] = {x.primitive: name for name, x in REDUCTIONS.items()}
"""The name of the reduction, by primitive."""
