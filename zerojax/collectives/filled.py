"""Stacks of layers that stay gathered, made whole by the first loop over them.

Parameters that stay gathered could be gathered before the step begins (stages 1 and 2, and at stage
3 those of ``stage3_max_live_parameters``), with nothing to hide that. A stack of layers that the
forward loop reads layer by layer is gathered by that loop instead, one layer ahead, see
:mod:`zerojax.collectives.ahead`; what it gathers is stacked for the backward loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import many
from zerojax.collectives.ahead import Ahead, gathered_dtype
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.shard import FilledStack, Shard
from zerojax.collectives.uses import CAST
from zerojax.plan import layout
from zerojax.trace.elementwise import ELEMENTWISE, REDUCTIONS
from zerojax.xla import jaxprs

_Reader = tuple[Any, int]  # a scan, and the position of the stack among those that it reads


def leave(closed: Any, args: Sequence[Any], gatherer: Gatherer) -> list[Any]:
    """``args`` of a jaxpr that runs once a step: those stacks are left to its loops that were to be
    gathered in advance, and that loops alone read, the first of them one layer ahead."""
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    return [
        dataclasses.replace(x, whole=None, fills=True)
        if _is_stack(x, gatherer.axis) and _fills(list(_readers(jaxpr, v)), x, gatherer)
        else x
        for v, x in zip(jaxpr.invars, args, strict=True)
    ]


class Filling:
    """The stacks that a loop fills.

    Args:
      xs: What it reads.
      ahead: What it gathers ahead.
      reverse: Whether it starts with the last layer.
      gatherer: Gathers parameters.
    """

    def __init__(
        self, xs: Sequence[Any], ahead: Ahead, *, reverse: bool, gatherer: Gatherer
    ) -> None:
        self._ahead, self._reverse = ahead, reverse
        self._dimensions = {
            i: layout.dimensions(x.spec, gatherer.axis)[0]
            for i, x in enumerate(xs)
            if isinstance(x, Shard) and x.fills
        }
        self._xs = xs

    def layers(self, coming: Sequence[jax.Array]) -> list[jax.Array]:
        """What an iteration stacks, of what it has gathered for the next one: as the collective
        leaves it."""
        if not self._dimensions:
            return []
        wholes = self._ahead.wholes(coming)
        chosen = [(x, d) for i, d in self._dimensions.items() if (x := wholes[i]) is not None]
        return [jnp.moveaxis(x, d - 1, 0) for x, d in chosen]

    def filled(
        self, first: Sequence[jax.Array], stacks: Sequence[jax.Array]
    ) -> list[tuple[Shard, Shard]]:
        """Each shard, and the same gathered, of what the first iteration was given and what all of
        them have stacked. The last one has gathered its own layer again, for nobody."""
        step, last = (-1, 0) if self._reverse else (1, -1)
        found = []
        for (i, d), layer, stack in zip(
            self._dimensions.items(), self.layers(first), stacks, strict=True
        ):
            stack = lax.dynamic_update_index_in_dim(stack, layer, last % len(stack), 0)
            moved = FilledStack(stack, d, step)
            x = self._xs[i]
            found.append((x, dataclasses.replace(x, whole=moved.whole, moved=moved, fills=False)))
        return found


def _is_stack(x: Any, axis: str) -> bool:
    """Whether ``x`` is gathered in advance, as it is, and may be a stack of layers."""
    if not isinstance(x, Shard) or x.whole is None or many.is_whole(x, axis):
        return False
    return x.spec[0] is None and len(layout.dimensions(x.spec, axis)) == 1


def _fills(readers: list[_Reader | None], x: Shard, gatherer: Gatherer) -> bool:
    if len(readers) < 2 or readers[0] is None or None in readers:
        return False
    dtype = gathered_dtype(*readers[0], x, gatherer)
    return dtype is not None and dtype == x.value.dtype  # to numpy None is float64


def _readers(jaxpr: Any, v: Any) -> Iterator[_Reader | None]:
    """The loops that take the layers of ``v``, in order; None for another use."""
    jaxpr, _ = jaxprs.open_jaxpr(jaxpr)
    for eqn in jaxpr.eqns:
        for i in (i for i, x in enumerate(eqn.invars) if x is v):
            if eqn.primitive is prims.scan_p:
                at = i - sum(jaxprs.scan_counts(eqn))
                yield (eqn, at) if at >= 0 else None
            elif eqn.primitive in jaxprs.CALLS and eqn.primitive is not prims.remat_p:
                (body,) = jaxprs.bodies(eqn)
                yield from _readers(body, body.invars[i])
            elif not _on_shards(jaxpr, eqn, i):
                yield None
    if any(x is v for x in jaxpr.outvars):
        yield None


def _on_shards(jaxpr: Any, eqn: Any, i: int) -> bool:
    """Whether an equation, and what is cast by it, needs nothing gathered of its operand ``i``."""
    name, out = eqn.primitive.name, eqn.outvars[0]
    if name == CAST:
        return not list(_readers(jaxpr, out))
    return name in REDUCTIONS or (
        name in ELEMENTWISE and out.aval.shape == eqn.invars[i].aval.shape
    )
