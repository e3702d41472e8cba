"""Stacks of layers that lie, once gathered, as the collective leaves them.

An all-gather puts the devices' pieces one behind the other, so that the dimension along which a
parameter is sharded comes first in memory. A loop wants its layers one behind the other. XLA would
transpose the whole stack in between, and hold it twice. Here a loop takes each layer from the stack
as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import decisions, many
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.readers import readers
from zerojax.collectives.shard import MovedStack, Shard
from zerojax.plan import layout
from zerojax.xla import jaxprs


def move(closed: Any, args: Sequence[Any], gatherer: Gatherer) -> list[Any]:
    """``args`` of a jaxpr, of which loops alone read some stacks that are gathered in advance:
    those are gathered as they will lie."""
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    return [
        _moved(x, d, gatherer)
        if (d := _dimension(x, gatherer)) is not None and None not in readers(jaxpr, v)
        else x
        for v, x in zip(jaxpr.invars, args, strict=True)
    ]


def _dimension(x: Any, gatherer: Gatherer) -> int | None:
    """The dimension along which a stack of layers is sharded; None where it is no such stack, or is
    not gathered in advance."""
    axis = gatherer.axis
    if not isinstance(x, Shard) or x.gathered is None:
        return None
    if many.is_whole(x, axis) or x.value.ndim < 3 or x.spec[0] is not None:
        return None
    parts = layout.dimensions(x.spec, axis)
    return parts[0] if len(parts) == 1 else None


def _moved(x: Shard, d: int, gatherer: Gatherer) -> Shard:
    assert x.gathered is not None
    order = (d, *(i for i in range(x.value.ndim) if i != d))
    value = lax.transpose(x.value.astype(x.gathered.array.dtype), order)
    spec = [x.spec[i] for i in order]
    with gatherer.ledger.place(decisions.ENTRY, "gathered once a step and kept, read by loops"):
        moved = MovedStack(gatherer.whole(value, spec, quantized=x.gathering.quantized), d)
    return x.with_copy(jnp.moveaxis(moved.value, 0, d), moved)


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
