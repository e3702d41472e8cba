"""What reads a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import primitives as prims

from zerojax.collectives.uses import CAST
from zerojax.graph.graph import graph_of
from zerojax.graph.primitives import ELEMENTWISE, REDUCTIONS
from zerojax.xla import jaxprs


class Reader(NamedTuple):
    """A loop that takes a stack layer by layer.

    Attributes:
      eqn: The scan.
      at: The position of the stack among those that the scan reads.
      cast: Whether the stack is cast before.
    """

    eqn: Any
    at: int
    cast: bool


def readers(jaxpr: Any, v: Any, cast: bool = False) -> Iterator[Reader | None]:
    """What needs ``v`` whole, in order: loops that take it layer by layer; None for another use.

    Args:
      jaxpr: A jaxpr.
      v: One of its variables.
      cast: Whether ``v`` is the result of a cast.
    """
    jaxpr, _ = jaxprs.open_jaxpr(jaxpr)
    graph = graph_of(jaxpr)
    for use in graph.users(v):
        yield from _of_use(jaxpr, *use, cast)
    if graph.returned(v):
        yield None


def _of_use(jaxpr: Any, eqn: Any, i: int, cast: bool) -> Iterator[Reader | None]:
    if eqn.primitive is prims.scan_p:
        at = i - sum(jaxprs.scan_counts(eqn))
        yield Reader(eqn, at, cast) if at >= 0 else None
    elif eqn.primitive in jaxprs.CALLS and eqn.primitive is not prims.remat_p:
        (body,) = jaxprs.bodies(eqn)
        yield from readers(body, body.invars[i], cast)
    elif eqn.primitive.name == CAST:
        yield from readers(jaxpr, eqn.outvars[0], cast=True)
    elif not _on_shards(eqn, i):
        yield None


def _on_shards(eqn: Any, i: int) -> bool:
    """Whether an equation needs nothing gathered of its operand ``i``: what is made element by
    element is gathered itself."""
    name = eqn.primitive.name
    same = name in ELEMENTWISE and eqn.outvars[0].aval.shape == eqn.invars[i].aval.shape
    return same or name in REDUCTIONS
