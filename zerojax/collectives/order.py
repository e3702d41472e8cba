"""The order of the backward pass, for XLA's scheduler.

Nothing in the backward pass depends on a parameter's gradient, so XLA may defer all gradients to
its end, and then keeps the activations of every layer for them. The dependences added here keep a
block from starting before the gradients of an earlier block exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.shard import ReducedGradient, Shard


def hold_until(
    values: Sequence[Shard | jax.Array],
    done: Sequence[ReducedGradient],
    constrain: Callable[..., jax.Array],
) -> list[Shard | jax.Array]:
    """Returns ``values``, some of which depend on the gradients ``done``.

    A sharded parameter waits for a gradient of the same shape, dtype and spec, which costs no
    communication. The first sharded parameter waits for all other gradients; if there is no such
    parameter, the last floating array, which is a cotangent, does. Those waits cost an all-reduce
    of one bit.
    """
    remaining = list(done)
    waits: list[jax.Array | None] = [None] * len(values)
    for i, v in enumerate(values):
        twin = next((g for g in remaining if isinstance(v, Shard) and _alike(v, g)), None)
        if twin is not None:
            remaining = [g for g in remaining if g is not twin]
            waits[i] = impossible(twin.value)
    shards = [i for i, v in enumerate(values) if isinstance(v, Shard)]
    floats = [i for i, v in enumerate(values) if i not in shards and _is_float(v)]
    target = shards[0] if shards else floats[-1] if floats else None
    if target is not None:
        for g in remaining:
            bit = jnp.any(impossible(g.value)) if any(g.spec) else impossible(_element(g.value))
            earlier = waits[target]
            waits[target] = bit if earlier is None else earlier | bit
    return [
        v if wait is None else _held(v, wait, constrain)
        for v, wait in zip(values, waits, strict=True)
    ]


def hold_largest(values: Sequence[jax.Array], done: jax.Array) -> list[jax.Array]:
    """Returns ``values``, with the largest floating array dependent on ``done``, an unsharded
    array."""
    sizes = [v.size if _is_float(v) else 0 for v in values]
    at = sizes.index(max(sizes, default=0)) if any(sizes) else None
    wait = impossible(_element(done))
    return [_choose(wait, v) if i == at else v for i, v in enumerate(values)]


def _held(
    v: Shard | jax.Array, wait: jax.Array, constrain: Callable[..., jax.Array]
) -> Shard | jax.Array:
    if isinstance(v, Shard):
        return v.with_value(constrain(_choose(wait, v.value), v.spec))
    return _choose(wait, v)


def _choose(wait: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(wait, jnp.zeros_like(x), x)


def _is_float(x: Any) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _alike(v: Shard, g: ReducedGradient) -> bool:
    return (v.value.shape, v.value.dtype, v.spec) == (g.value.shape, g.value.dtype, g.spec)


def _element(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim]


def impossible(x: jax.Array) -> jax.Array:
    """Returns False for each element, which XLA cannot prove: it has to keep this dependence,
    whereas it removes barriers before it schedules."""
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    magnitude = jnp.array(jnp.iinfo(unsigned).max >> 1, unsigned)
    return (lax.bitcast_convert_type(x, unsigned) & magnitude) > magnitude
