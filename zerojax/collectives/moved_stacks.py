"""Gathered stacks of layers that stay in the layout of the collective.

An all-gather concatenates the devices' shards, so that the dimension along which a parameter is
sharded comes first in memory. A loop expects its layers one after another. In between XLA would
transpose the full stack, and hold it twice. Instead a loop takes each layer from the stack in the
layout of the all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.shard import MovedStack, Shard
from zerojax.xla.types import PyTree


def of(x: object) -> MovedStack | None:
    """Returns the unsharded copy of a stack in the layout in which a loop reads it; None if there
    is none, or if it was rounded."""
    if not isinstance(x, Shard) or x.gathered is None or x.is_rounded:
        return None
    return x.gathered.stack


def scan(body: Callable[..., PyTree], init: PyTree, xs: PyTree, **keywords: Any) -> PyTree:
    """Runs ``lax.scan`` on stacks some of which are a :class:`MovedStack`."""
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    if not moved:
        return lax.scan(body, init, xs, **keywords)

    def entry(carry: PyTree, at: tuple[jax.Array, list[jax.Array]]) -> PyTree:
        index, others = at
        unmoved = iter(others)
        layers = [
            moved[i].layer(index) if i in moved else next(unmoved) for i in range(len(leaves))
        ]
        return body(carry, jax.tree.unflatten(tree, layers))

    others = [x for i, x in enumerate(leaves) if i not in moved]
    return lax.scan(entry, init, (jnp.arange(keywords["length"]), others), **keywords)
