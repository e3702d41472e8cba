"""Parameters that a step rounds before it needs them whole, gathered once in the narrower dtype.

flax casts a module's float32 parameters to its ``dtype`` where they are used: in each micro-batch,
and in a loop over layers in each iteration. At stages 1 and 2 parameters are gathered once a step,
and so are at stage 3 those that stay gathered. Gathered as they are, these would be sent and held
in float32; gathered behind their casts, once for each micro-batch. So the cast is done in advance,
and its result gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.collectives import decisions, many, propagate
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.shard import Gathered, HostStack, Shard
from zerojax.collectives.uses import CAST, Uses
from zerojax.collectives.widening import whole_of
from zerojax.xla import jaxprs


def round_in_advance(closed: Any, args: Sequence[Any], gatherer: Gatherer) -> list[Any]:
    """``args`` of a jaxpr with those shards gathered rounded that are needed whole only so.

    Those that are not gathered in advance are left as they are, and small ones.
    """
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    uses = Uses(gatherer.mesh, gatherer.axis)
    entered = []
    for v, x in zip(jaxpr.invars, args, strict=True):
        if _is_large(x, gatherer.axis):
            dtypes = uses.dtypes(jaxpr, v, x.spec)
            if len(dtypes) == 1 and v.aval.dtype not in dtypes:
                narrow = x.value.astype(*dtypes)
                with gatherer.ledger.place(decisions.ENTRY, "cast, gathered once a step and kept"):
                    whole = gatherer.whole(narrow, x.spec, quantized=x.gathering.quantized)
                x = x.with_copy(whole)
        entered.append(x)
    return entered


def _is_large(x: Any, axis: str) -> bool:
    return isinstance(x, Shard) and x.whole is not None and not many.is_whole(x, axis)


def follow(eqn: Any, values: Sequence[Any], axis: str) -> Gathered | None:
    """The unsharded copy of the result of an equation on shards and numbers; None where unknown.

    A cast, or a change of layout, of what has been gathered is done once more on the whole; so is
    all work on small parameters. Other work is not: what it makes is gathered, and its operands
    need not be.
    """
    shard, name = values[0], eqn.primitive.name
    rounded = shard.gathered if isinstance(shard, Shard) and shard.is_rounded else None
    if name == CAST and rounded is not None and rounded.array.dtype == eqn.outvars[0].aval.dtype:
        return rounded
    small = all(many.is_whole(v, axis) or _is_number(v) for v in values)
    follows = propagate.follows(eqn)
    copies = [whole_of(v) if isinstance(v, Shard) else v for v in values]
    if copies[0] is None and follows and rounded is not None:
        copies[0] = rounded.array
    if copies[0] is None or not (small or follows or name == CAST):
        return None
    return Gathered(jaxprs.bind(eqn, copies)[0])


def _is_number(value: Any) -> bool:
    return not isinstance(value, Shard | HostStack) and not jnp.ndim(value)
