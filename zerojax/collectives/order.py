"""The order of the backward pass, for XLA's scheduler.

Making a parameter's gradient is on nobody's path, so XLA may put it off to the end of the
backward pass, and then keeps the activations of every layer for it. What is tied here cannot
start before the gradients of an earlier block are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import layout
from zerojax.collectives.shard import Made, Shard


def after(
    values: Sequence[Any], done: Sequence[Made], axis: str, constrain: Callable[..., jax.Array]
) -> list[Any]:
    """``values``, the shards among them not before the gradients ``done``.

    A parameter waits for a gradient of its own shape and cut, which costs no communication;
    the first one for those that no parameter is like.
    """
    left = list(done)
    twins: list[jax.Array | None] = []
    for v in values:
        twin = next((g for g in left if isinstance(v, Shard) and _alike(v, g)), None)
        left = [g for g in left if g is not twin]
        twins.append(None if twin is None else _impossible(twin.value))
    first = next((i for i, v in enumerate(values) if isinstance(v, Shard)), None)
    if first is not None:
        for g in left:
            sign = jnp.any(_impossible(g.value)) if _cut(g, axis) else _impossible(_element(g.value))
            twins[first] = sign if twins[first] is None else twins[first] | sign
    return [
        v if t is None else Shard(constrain(jnp.where(t, jnp.zeros_like(v.value), v.value), v.spec), v.spec)
        for v, t in zip(values, twins, strict=True)
    ]


def _alike(v: Shard, g: Made) -> bool:
    return (v.value.shape, v.value.dtype, v.spec) == (g.value.shape, g.value.dtype, g.spec)


def _cut(g: Made, axis: str) -> bool:
    return any(layout.axes(entry) for entry in g.spec)


def _element(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim]


def _impossible(x: jax.Array) -> jax.Array:
    """False for each element, which XLA does not see: a dependence it has to keep, where a
    barrier would be gone by the time it schedules."""
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    magnitude = jnp.array(jnp.iinfo(unsigned).max >> 1, unsigned)
    return (lax.bitcast_convert_type(x, unsigned) & magnitude) > magnitude
