"""The iterations of a loop over stacks, some of them outside the loop.

A loop whose iterations gather for the next one and reduce for the previous one has nothing to
gather in its last iteration, and nothing to reduce in its first. These two run outside the loop: in
it, one layer too many would be gathered, and one reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.host import send_to_host
from zerojax.collectives.shard import MovedStack
from zerojax.xla.types import PyTree


def scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    *,
    length: int,
    reverse: bool,
    unroll: int,
    peel: bool,
) -> tuple[PyTree, PyTree]:
    """Runs ``lax.scan`` on stacks some of which are a :class:`MovedStack`.

    Args:
      body: ``body(carry, entries)`` returns the next carry and the entries of the results.
      init: The first carry.
      xs: The stacks.
      length, reverse, unroll: See ``lax.scan``.
      peel: Whether the first and the last of at least two iterations run outside the loop, the last
        as ``body(carry, entries, last=True)``. The first and the last carry may then have another
        structure than those between iterations.
    """
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    others = [x for i, x in enumerate(leaves) if i not in moved]
    if not moved and not peel:
        return lax.scan(body, init, xs, length=length, reverse=reverse, unroll=unroll)

    def entries(index: jax.Array | int, others: Sequence[jax.Array]) -> PyTree:
        unmoved = iter(others)
        layers = [
            moved[i].layer(index) if i in moved else next(unmoved) for i in range(len(leaves))
        ]
        return jax.tree.unflatten(tree, layers)

    if not peel:
        return lax.scan(
            lambda carry, at: body(carry, entries(*at)),
            init,
            (jnp.arange(length), others),
            reverse=reverse,
            unroll=unroll,
        )

    def run(state: PyTree, index: jax.Array | int, **end: bool) -> tuple[PyTree, PyTree]:
        carry, stacks = state
        sliced = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in others]
        carry, ys = body(carry, entries(index, sliced), **end)
        if stacks is None:
            stacks = jax.tree.map(partial(_zeros, length), ys)
        put = partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(put, stacks, ys)

    first, *between, last = reversed(range(length)) if reverse else range(length)
    state = run((init, None), first)
    if between:
        indices = jnp.asarray(between)
        state, _ = lax.scan(lambda s, i: (run(s, i), None), state, indices, unroll=unroll)
    return run(state, last, last=True)


def _zeros(length: int, entry: jax.Array) -> jax.Array:
    """Returns a stack of zeros for entries like ``entry``, in the same memory."""
    zero = jnp.zeros((), entry.dtype)
    if jax.typeof(entry).memory_space == jax.memory.Space.Host:
        zero = send_to_host(zero)
    return lax.broadcast(zero, (length, *entry.shape))
