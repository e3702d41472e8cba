"""Unsharded copies of values that are computed from gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.collectives import propagate
from zerojax.collectives.gathering import is_gathered
from zerojax.collectives.shard import HostStack, Shard, UnshardedCopy
from zerojax.collectives.uses import CAST
from zerojax.collectives.widening import unsharded_of
from zerojax.plan.rule import is_small
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def follow(eqn: Equation, values: Sequence[object], axis: str, most: int) -> UnshardedCopy | None:
    """Returns the unsharded copy of the result of an equation on shards and scalars; None if it is
    unknown.

    A cast or a change of layout of a gathered shard is repeated on its unsharded copy; so is every
    equation on parameters of at most ``most`` elements. Other equations are not repeated: their
    results are gathered, and their operands need not be.
    """
    shard, name = values[0], eqn.primitive.name
    rounded = shard.gathered if isinstance(shard, Shard) and shard.is_rounded else None
    if name == CAST and rounded is not None and rounded.array.dtype == eqn.outvars[0].aval.dtype:
        return rounded
    small = all(
        _is_number(v) or (is_gathered(v) and is_small(v.value.shape, v.spec, axis, most))
        for v in values
    )
    follows = propagate.follows(eqn)
    copies = [unsharded_of(v) if isinstance(v, Shard) else v for v in values]
    if copies[0] is None and follows and rounded is not None:
        copies[0] = rounded.array
    if copies[0] is None or not (small or follows or name == CAST):
        return None
    return UnshardedCopy(jaxprs.bind(eqn, copies)[0])


def _is_number(value: Any) -> bool:
    return not isinstance(value, Shard | HostStack) and not jnp.ndim(value)
