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
        shard = Shard(
            shard.value.astype(dtype), shard.spec, narrow=shard, quantized=shard.quantized
        )
    return shard


def whole_of(shard: Shard) -> jax.Array | None:
    """A shard whole, if it was gathered in advance, or what it was cast from."""
    if shard.whole is not None or shard.narrow is None:
        return shard.whole
    whole = whole_of(shard.narrow)
    return None if whole is None else whole.astype(shard.value.dtype)


def travelling(value: Any) -> Any:
    """What passes a barrier for a value: of a shard that was widened what was cast, and of one that
    was gathered in advance what was gathered."""
    source = _source(value)
    known = _gathered(source)
    return source if known is None else known


def arrived(value: Any, new: Any) -> Any:
    """``value`` again, given what :func:`travelling` has become behind the barrier."""
    source = _source(value)
    if not isinstance(source, Shard):
        return new
    if source.rounded is not None:
        new = Shard(source.value, source.spec, rounded=new, quantized=source.quantized)
    elif source.whole is not None:
        new = Shard(source.value, source.spec, new, quantized=source.quantized)
    return new if source is value else widened(new, widenings(value))


def _source(value: Any) -> Any:
    """The narrowest of a shard, unless only ``value`` itself was gathered in advance."""
    source = narrowest(value)
    return value if _gathered(source) is None and _gathered(value) is not None else source


def _gathered(value: Any) -> jax.Array | None:
    """What was gathered of a shard in advance."""
    if not isinstance(value, Shard):
        return None
    return value.whole if value.rounded is None else value.rounded


def like(value: Any, new: jax.Array) -> Any:
    """A new array in place of that of a shard, or of an array."""
    return Shard(new, value.spec, quantized=value.quantized) if isinstance(value, Shard) else new
