"""Gathered stacks of layers that stay in the layout of the collective.

An all-gather concatenates the devices' shards, so that the dimension along which a parameter is
sharded comes first in memory. A loop expects its layers one after another. In between XLA would
transpose the full stack, and hold it twice. Instead a loop takes each layer from the stack in the
layout of the all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    *,
    length: int,
    reverse: bool,
    unroll: int,
    peel: bool = False,
) -> tuple[PyTree, PyTree]:
    """Runs ``lax.scan`` on stacks some of which are a :class:`MovedStack`.

    Args:
      body: ``body(carry, entries)`` returns the next carry and the entries of the results.
      init: The first carry.
      xs: The stacks.
      length, reverse, unroll: See ``lax.scan``.
      peel: Whether the first and the last of at least two iterations run outside the loop, as
        ``body(carry, entries, first=True)`` and ``body(carry, entries, last=True)``. Only the
        carries between two iterations have equal shapes then.
    """
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    if not moved and not peel:
        return lax.scan(body, init, xs, length=length, reverse=reverse, unroll=unroll)

    def entries(index: jax.Array | int, others: Sequence[jax.Array]) -> PyTree:
        unmoved = iter(others)
        return jax.tree.unflatten(
            tree,
            [moved[i].layer(index) if i in moved else next(unmoved) for i in range(len(leaves))],
        )

    others = [x for i, x in enumerate(leaves) if i not in moved]
    if not peel:
        return lax.scan(
            lambda carry, at: body(carry, entries(*at)),
            init,
            (jnp.arange(length), others),
            length=length,
            reverse=reverse,
            unroll=unroll,
        )

    def run(state: PyTree, index: jax.Array | int, **ends: bool) -> PyTree:
        carry, stacks = state
        sliced = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in others]
        carry, ys = body(carry, entries(index, sliced), **ends)
        if stacks is None:
            stacks = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), ys)
        put = partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(put, stacks, ys)

    first, *between, last = range(length)[:: -1 if reverse else 1]
    state = run((init, None), first, first=True)
    if between:
        indices = jnp.asarray(between)
        state, _ = lax.scan(lambda s, i: (run(s, i), None), state, indices, unroll=unroll)
    return run(state, last, last=True)
