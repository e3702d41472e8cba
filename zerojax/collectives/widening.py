"""Shards that were cast to a wider dtype, which travel and are gathered in the narrower one.

A widening cast makes no new number, so that a loop, a barrier or a rematerialised block takes what
was cast, and the cast is done again behind it. Otherwise what is gathered there would be the wide
one: a float32 head of a bf16 model, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.collectives.shard import Shard


def narrowest(value: Any) -> Any:
    """What a shard was cast from, by one widening cast or several; other values as they are."""
    while isinstance(value, Shard) and value.narrow is not None:
        value = value.narrow
    return value


def widenings(value: Any) -> tuple[Any, ...]:
    """The dtypes to which :func:`narrowest` was cast, one after the other, to make ``value``."""
    if not isinstance(value, Shard) or value.narrow is None:
        return ()
    return *widenings(value.narrow), value.value.dtype


def widened(shard: Shard, dtypes: Sequence[Any]) -> Shard:
    """A shard after these casts."""
    for dtype in dtypes:
        shard = Shard(shard.value.astype(dtype), shard.spec, narrow=shard)
    return shard


def travelling(value: Any) -> Any:
    """What passes a barrier for a value: of a shard that was gathered in advance what was gathered,
    of one that was widened what was cast."""
    if isinstance(value, Shard) and value.rounded is not None:
        return value.rounded
    if isinstance(value, Shard) and value.whole is not None:
        return value.whole
    return narrowest(value)


def arrived(value: Any, new: Any) -> Any:
    """``value`` again, given what :func:`travelling` has become behind the barrier."""
    if isinstance(value, Shard) and value.rounded is not None:
        return Shard(value.value, value.spec, rounded=new)
    if isinstance(value, Shard) and value.whole is not None:
        return Shard(value.value, value.spec, new)
    return widened(new, widenings(value)) if isinstance(new, Shard) else new


def like(value: Any, new: jax.Array) -> Any:
    """A new array in place of that of a shard, or of an array."""
    return Shard(new, value.spec) if isinstance(value, Shard) else new
