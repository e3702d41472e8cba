"""Shards that were cast to a wider dtype, which travel and are gathered in the narrower one.

A widening cast makes no new number, so that a loop, a barrier or a rematerialised block takes what
was cast, and the cast is done again behind it. Otherwise what is gathered there would be the wide
one: a float32 head of a bf16 model, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.collectives.loops import wider
from zerojax.collectives.shard import Narrow, Shard
from zerojax.xla import jaxprs


def narrowest(value: Any) -> Any:
    """What a shard was cast from, by one widening cast or several; other values as they are."""
    while (narrow := _cast_from(value)) is not None:
        value = narrow.shard
    return value


def widenings(value: Any) -> tuple[Any, ...]:
    """The dtypes to which :func:`narrowest` was cast, one after the other, to make ``value``."""
    narrow = _cast_from(value)
    return () if narrow is None else (*widenings(narrow.shard), value.value.dtype)


def _cast_from(value: Any) -> Narrow | None:
    """What a shard is the cast of."""
    narrow = value.gathering.narrow if isinstance(value, Shard) else None
    return narrow if narrow is not None and narrow.is_cast else None


def widened(shard: Shard, dtypes: Sequence[Any]) -> Shard:
    """A shard after these casts."""
    for dtype in dtypes:
        narrow = Narrow.cast(shard, dtype)
        shard = shard.with_value(narrow.widen(shard.value)).with_gathering(narrow=narrow)
    return shard


def whole_of(shard: Shard) -> jax.Array | None:
    """A shard whole, if it was gathered in advance, or what it was cast from."""
    narrow = shard.gathering.narrow
    if shard.whole is not None or narrow is None:
        return shard.whole
    whole = whole_of(narrow.shard)
    return None if whole is None else narrow.widen(whole)


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
    if source.gathered is not None:
        new = source.with_value(source.value).with_copy(new)
    return new if source is value else widened(new, widenings(value))


def _source(value: Any) -> Any:
    """The narrowest of a shard, unless only ``value`` itself was gathered in advance."""
    source = narrowest(value)
    return value if _gathered(source) is None and _gathered(value) is not None else source


def _gathered(value: Any) -> jax.Array | None:
    """What was gathered of a shard in advance."""
    if not isinstance(value, Shard) or value.gathered is None:
        return None
    return value.gathered.array


def like(value: Any, new: jax.Array) -> Any:
    """A new array in place of that of a shard, or of an array."""
    return value.with_value(new) if isinstance(value, Shard) else new


def widens_integers(eqn: Any) -> bool:
    """Whether it casts integers to a dtype with more bytes: the codes of a quantized base."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(old, jnp.integer) and new.itemsize > old.itemsize


MOST = 64
"""The most equations that are repeated on gathered integers."""


def narrow_of(eqn: Any, values: Sequence[Any]) -> Narrow | None:
    """The shard to gather in place of the result of an equation that works element by element: the
    operand of a widening cast; and integers that were cast so, where the result follows from them
    and unsharded operands, as the scaling of a quantized base does."""
    shards = [v for v in values if isinstance(v, Shard)]
    is_cast = eqn.primitive.name == "convert_element_type"
    if is_cast and (wider(eqn.outvars[0], eqn.invars[0]) or widens_integers(eqn)):
        return Narrow.cast(shards[0], eqn.outvars[0].aval.dtype)
    codes = [_from_codes(v) for v in shards]
    count = 2 + sum(each.equations for each in codes)
    if len({id(each.shard) for each in codes}) > 1 or not 2 < count <= MOST:
        return None
    if not jnp.issubdtype(codes[0].shard.value.dtype, jnp.integer):
        return None

    def widen(x: jax.Array) -> jax.Array:
        wide = iter(codes)
        operands = [next(wide).widen(x) if isinstance(v, Shard) else v for v in values]
        return jaxprs.bind(eqn, operands)[0]

    return Narrow(codes[0].shard, widen, count)


def _from_codes(shard: Shard) -> Narrow:
    """The narrowest shard that another one is computed from, and how; itself where it is."""
    step = shard.gathering.narrow
    if step is None:
        return Narrow(shard, lambda x: x, 0)
    source = _from_codes(step.shard)
    equations = source.equations + step.equations
    return Narrow(source.shard, lambda x: step.widen(source.widen(x)), equations)
