"""Stacks of layers that lie, once gathered, as the collective leaves them.

An all-gather puts the devices' pieces one behind the other, so that the dimension along which a
parameter is sharded comes first in memory. A loop wants its layers one behind the other. XLA would
transpose the whole stack in between, and hold it twice. Here a loop takes each layer from the stack
as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.shard import MovedStack, Shard


def of(x: Any) -> MovedStack | None:
    """A stack in the form in which a loop reads what was gathered of it as it is."""
    if not isinstance(x, Shard) or x.gathered is None or x.is_rounded:
        return None
    return x.gathered.stack


def scan(body: Callable[..., Any], init: Any, xs: Any, **keywords: Any) -> Any:
    """``lax.scan``, some of whose stacks are a :class:`MovedStack`."""
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    if not moved:
        return lax.scan(body, init, xs, **keywords)

    def entry(carry: Any, at: tuple[jax.Array, list[Any]]) -> Any:
        index, others = at
        rest = iter(others)
        here = [moved[i].layer(index) if i in moved else next(rest) for i in range(len(leaves))]
        return body(carry, jax.tree.unflatten(tree, here))

    others = [x for i, x in enumerate(leaves) if i not in moved]
    return lax.scan(entry, init, (jnp.arange(keywords["length"]), others), **keywords)
