"""Shards that were cast to a wider dtype, and are passed on and gathered in the narrower one.

A widening cast adds no information, so that a loop, a barrier or a rematerialised block takes the
operand of the cast, and the cast is repeated after it. Otherwise the wide array would be gathered:
a float32 head of a bf16 model, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.collectives import propagate
from zerojax.collectives.carried_sums import wider
from zerojax.collectives.gathering import Gatherer, is_gathered
from zerojax.collectives.shard import HostStack, Narrow, Shard, UnshardedCopy
from zerojax.graph.primitives import CAST
from zerojax.plan.rule import is_small
from zerojax.xla.types import Equation

T = TypeVar("T")


def narrowest(value: Shard | T) -> Shard | T:
    """Returns the shard from which a shard was cast, by one or several widening casts; other values
    unchanged."""
    while (narrow := _cast_from(value)) is not None:
        value = narrow.shard
    return value


def widenings(value: Any) -> tuple[np.dtype, ...]:
    """Returns the dtypes of the casts from :func:`narrowest` to ``value``, in order."""
    narrow = _cast_from(value)
    return () if narrow is None else (*widenings(narrow.shard), value.value.dtype)


def _cast_from(value: object) -> Narrow | None:
    """Returns the narrow form of a shard that is a widening cast; None for other values."""
    narrow = value.gathering.narrow if isinstance(value, Shard) else None
    return narrow if narrow is not None and narrow.is_cast else None


def widened(shard: Shard, dtypes: Sequence[np.dtype]) -> Shard:
    """Returns a shard after these casts."""
    for dtype in dtypes:
        narrow = Narrow.cast(shard, dtype)
        shard = shard.with_value(narrow.widen(shard.value)).with_gathering(narrow=narrow)
    return shard


def unsharded_of(shard: Shard) -> jax.Array | None:
    """Returns the unsharded array of a shard if it, or the shard from which it was computed, was
    gathered in advance; otherwise None."""
    narrow = shard.gathering.narrow
    if shard.unsharded is not None or narrow is None:
        return shard.unsharded
    unsharded = unsharded_of(narrow.shard)
    return None if unsharded is None else narrow.widen(unsharded)


def travelling(value: object) -> object:
    """Returns the value to send through a barrier in place of ``value``: for a widened shard the
    operand of the casts, for a shard that was gathered in advance the gathered array."""
    source = _source(value)
    gathered = _gathered(source)
    return source if gathered is None else gathered


def arrived(value: object, new: Any) -> object:
    """Rebuilds ``value`` after a barrier, from the result for :func:`travelling`."""
    source = _source(value)
    if not isinstance(source, Shard):
        return new
    if source.gathered is not None:
        new = source.with_value(source.value).with_copy(new)
    return new if source is value else widened(new, widenings(value))


def _source(value: object) -> object:
    """Returns :func:`narrowest` of a value, or ``value`` if only that was gathered in advance."""
    source = narrowest(value)
    return value if _gathered(source) is None and _gathered(value) is not None else source


def _gathered(value: object) -> jax.Array | None:
    """Returns the array that was gathered of a shard in advance, in any dtype; otherwise None."""
    if not isinstance(value, Shard) or value.gathered is None:
        return None
    return value.gathered.array


def like(value: object, new: jax.Array) -> Shard | jax.Array:
    """Returns ``new`` in the form of ``value``: as a shard, or as an array."""
    return value.with_value(new) if isinstance(value, Shard) else new


def widens_integers(eqn: Equation) -> bool:
    """Returns whether a cast is from integers to a dtype with more bytes, as for the codes of a
    quantized base model."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(old, jnp.integer) and new.itemsize > old.itemsize


MOST = 64
"""The most equations that are repeated on gathered integers."""


def narrow_of(eqn: Equation, values: Sequence[object], gatherer: Gatherer) -> Narrow | None:
    """Returns the shard to gather in place of the result of an element-wise equation, or None: the
    operand of a widening cast; or integers that were widened, if the result is computed from them
    and unsharded operands, such as the scaled codes of a quantized base model."""
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
        remaining = iter(codes)
        operands = [next(remaining).widen(x) if isinstance(v, Shard) else v for v in values]
        return gatherer.bind(eqn, operands)[0]

    return Narrow(codes[0].shard, widen, count)


def _from_codes(shard: Shard) -> Narrow:
    """Returns the narrowest shard from which a shard is computed, with the computation; the shard
    itself, with no equations, if there is none."""
    step = shard.gathering.narrow
    if step is None:
        return Narrow(shard, lambda x: x, 0)
    source = _from_codes(step.shard)
    equations = source.equations + step.equations
    return Narrow(source.shard, lambda x: step.widen(source.widen(x)), equations)


def copy_of_result(
    eqn: Equation, values: Sequence[object], gatherer: Gatherer
) -> UnshardedCopy | None:
    """Returns the unsharded copy of the result of an equation on shards and scalars; None if it is
    unknown.

    A cast or a change of layout of a gathered shard is repeated on its unsharded copy; so is every
    equation on small parameters. Other equations are not repeated: their
    results are gathered, and their operands need not be.
    """
    shard, name = values[0], eqn.primitive.name
    rounded = shard.gathered if isinstance(shard, Shard) and shard.is_rounded else None
    if name == CAST and rounded is not None and rounded.array.dtype == eqn.outvars[0].aval.dtype:
        return rounded
    most = gatherer.thresholds.small
    small = all(
        _is_number(v) or (is_gathered(v) and is_small(v.value.shape, v.spec, gatherer.axis, most))
        for v in values
    )
    follows = propagate.follows(eqn)
    copies = [unsharded_of(v) if isinstance(v, Shard) else v for v in values]
    if copies[0] is None and follows and rounded is not None:
        copies[0] = rounded.array
    if copies[0] is None or not (small or follows or name == CAST):
        return None
    return UnshardedCopy(gatherer.bind(eqn, copies)[0])


def _is_number(value: Any) -> bool:
    return not isinstance(value, Shard | HostStack) and not np.ndim(value)
