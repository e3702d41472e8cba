"""Gathered stacks of layers that stay in the layout of the collective.

An all-gather concatenates the devices' shards, so that the dimension along which a parameter is
sharded comes first in memory. A loop expects its layers one after another. In between XLA would
transpose the full stack, and hold it twice. Instead a loop takes each layer from the stack in the
layout of the all-gather, see :mod:`zerojax.collectives.iterations`.
"""

from __future__ import annotations

from zerojax.collectives.shard import MovedStack, Shard


def of(x: object) -> MovedStack | None:
    """Returns the unsharded copy of a stack in the layout in which a loop reads it; None if there
    is none, or if it was rounded."""
    if not isinstance(x, Shard) or x.gathered is None or x.is_rounded:
        return None
    return x.gathered.stack
