"""Stacks of layers, unstacked for the loop over tokens.

A loop over layers copies each layer out of its stack before it multiplies by it: with few rows this
takes three times the memory traffic of the weights themselves. Generation therefore keeps an array
for each layer, and runs the layers one after another; XLA reads an array of its own in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.collectives.uses import readers
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation

Layered = list[Any]
"""Arrays, with a tuple of layers in place of each stack that only loops over layers read."""


class Stacks(NamedTuple):
    """The arrays that only loops over layers read; hashable.

    Attributes:
      params: For each parameter the number of its layers; 0 for another array.
      cache: The same for each array of the cache.
    """

    params: tuple[int, ...]
    cache: tuple[int, ...]

    @classmethod
    def of(cls, closed: AnyJaxpr, n_params: int, n_cache: int) -> Stacks:
        """Returns the stacks among the arguments of a traced program: parameters, then a cache."""
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        layers = [_layers(closed, v) for v in jaxpr.invars[: n_params + n_cache]]
        return cls(tuple(layers[:n_params]), tuple(layers[n_params:]))

    def __bool__(self) -> bool:
        return any(self.params) or any(self.cache)


def _layers(closed: AnyJaxpr, v: Any) -> int:
    loops = [*readers(closed, v)]
    is_stack = bool(loops) and all(loop is not None and not loop.cast for loop in loops)
    return int(v.aval.shape[0]) if is_stack else 0


def stacked(arrays: Layered) -> list[jax.Array]:
    """Returns arrays with the layers of each tuple stacked."""
    return [jnp.stack(x) if isinstance(x, tuple) else x for x in arrays]


def unstacked(arrays: Sequence[jax.Array], layers: Sequence[int]) -> Layered:
    """Returns arrays with a tuple of `layers` arrays in place of each stack."""
    return [tuple(x[i] for i in range(n)) if n else x for x, n in zip(arrays, layers, strict=True)]


def run(closed: AnyJaxpr, args: Sequence[Any], *, unroll: bool) -> list[Any]:
    """Runs a traced program; with `unroll` the layers of its loops run one after another."""
    return jaxprs.evaluate(closed, args, _unrolled if unroll else jaxprs.bind_in_context)


def _unrolled(eqn: Equation, values: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive is not prims.scan_p:
        return jaxprs.bind_in_context(eqn, values)
    with jaxprs.context(eqn):
        length = jaxprs.param(eqn, "length")
        return jaxprs.bind(eqn, values, {**eqn.params, "unroll": length})
