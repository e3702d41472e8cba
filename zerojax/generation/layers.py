"""Stacks of layers, unstacked for the loop over tokens.

A loop over layers copies each layer out of its stack before it multiplies by it: with few rows this
takes three times the memory traffic of the weights themselves. Generation therefore runs the layers
one after another. XLA then reads a layer of the parameters in place, whether it is an array or a
slice; a layer of the cache is an array, so that a token is written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def _layers(closed: AnyJaxpr, v: Any) -> int:
    loops = [*readers(closed, v)]
    is_stack = bool(loops) and all(loop is not None and not loop.cast for loop in loops)
    return int(v.aval.shape[0]) if is_stack else 0


def shapes(arrays: Layered) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of arrays, those of the stack for a tuple of layers."""
    return [
        jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype)
        if isinstance(x, tuple)
        else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in arrays
    ]


def unstacked(arrays: Sequence[jax.Array], layers: Sequence[int]) -> Layered:
    """Returns arrays with a tuple of `layers` arrays in place of each stack."""
    pairs = zip(arrays, layers, strict=True)
    return [tuple(_layer(x, i) for i in range(n)) if n else x for x, n in pairs]


def run(closed: AnyJaxpr, args: Layered) -> list[Any]:
    """Runs a traced program; the layers of a loop that takes unstacked ones run one after another.

    The loop's other stacks are sliced at fixed indices, so that XLA reads each slice in place.
    """
    return jaxprs.evaluate(closed, args, _run)


def _run(eqn: Equation, values: Sequence[Any]) -> Sequence[Any]:
    loop = jaxprs.scan_parts(eqn)
    consts, carry, stacks = (values, (), ()) if loop is None else loop.operands(values)
    if not any(isinstance(x, tuple) for x in stacks):
        arrays = [jnp.stack(x) if isinstance(x, tuple) else x for x in values]
        with jaxprs.traced_where(eqn):
            return jaxprs.bind(eqn, arrays)
    results: dict[int, Sequence[Any]] = {}
    for i in loop.order:
        layer = [_layer(x, i) for x in stacks]
        with jaxprs.traced_where(eqn):
            outs = jaxprs.evaluate(loop.body, [*consts, *carry, *layer], _run)
        carry, results[i] = loop.results(outs)
    layers = zip(*(results[i] for i in range(loop.length)), strict=True)
    return [*carry, *map(jnp.stack, layers)]


def _layer(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, tuple) else lax.index_in_dim(x, i, keepdims=False)
