"""Stacks of layers that stay gathered, made whole by the first loop over them.

Parameters that stay gathered could be gathered before the step begins (stages 1 and 2, and at stage
3 those of ``stage3_max_live_parameters``), with nothing to hide that. A stack of layers that the
forward loop reads layer by layer is gathered by that loop instead, one layer ahead, see
:mod:`zerojax.collectives.ahead`; what it gathers is stacked for the backward loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import many
from zerojax.collectives.ahead import Ahead, gathered_dtype
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.readers import Reader, readers
from zerojax.collectives.shard import FilledStack, Shard
from zerojax.collectives.uses import Uses
from zerojax.plan import layout
from zerojax.xla import jaxprs


def defer(closed: Any, args: Sequence[Any], gatherer: Gatherer) -> list[Any]:
    """``args`` of a jaxpr that runs once a step, without what was gathered in advance of stacks
    that loops alone read, the first of them one layer ahead: that loop fills those."""
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    uses = Uses(gatherer.mesh, gatherer.axis, surely=True)
    return [
        x.with_copy(None).with_gathering(by_loop=True)
        if _is_stack(x, gatherer.axis) and _fills(x, list(readers(jaxpr, v)), uses)
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
            if isinstance(x, Shard) and x.gathering.by_loop
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
        ahead, last = (-1, 0) if self._reverse else (1, -1)
        pairs = []
        for (i, d), layer, stack in zip(
            self._dimensions.items(), self.layers(first), stacks, strict=True
        ):
            stack = lax.dynamic_update_index_in_dim(stack, layer, last % len(stack), 0)
            moved = FilledStack(stack, d, ahead)
            x = self._xs[i]
            pairs.append((x, x.with_copy(moved.whole, moved).with_gathering(by_loop=False)))
        return pairs


def _is_stack(x: Any, axis: str) -> bool:
    """Whether ``x`` is gathered in advance, as it is, and may be a stack of layers."""
    if not isinstance(x, Shard) or x.whole is None or many.is_whole(x, axis):
        return False
    return x.spec[0] is None and len(layout.dimensions(x.spec, axis)) == 1


def _fills(x: Shard, loops: list[Reader | None], uses: Uses) -> bool:
    """Whether the first of the loops over a stack gathers it one layer ahead, as it is."""
    direct = [loop for loop in loops if loop is not None and not loop.cast]
    if len(direct) < max(2, len(loops)):
        return False
    dtype = gathered_dtype(direct[0].eqn, direct[0].at, x, uses)
    return dtype is not None and dtype == x.value.dtype  # to numpy None is float64
