"""Stacks of layers that the first loop over them gathers, and that stay gathered.

Parameters that stay gathered (at stages 1 and 2, and at stage 3 those of
``stage3_max_live_parameters``) could be gathered before the step begins, where nothing hides the
gathers. A stack of layers that the forward loop reads layer by layer is gathered by that loop
instead, one layer ahead, see :mod:`zerojax.collectives.ahead`; the loop stacks the gathered layers
for the backward loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.collectives.ahead import PrefetchedStacks
from zerojax.collectives.shard import FilledStack, Shard


class GatheredStacks:
    """The stacks that a loop gathers and stacks.

    Args:
      xs: The stacks that the loop reads.
      dimensions: By position of a stack that the loop gathers, the dimension along which the stack
        is sharded.
      ahead: The stacks that the loop reads ahead.
    """

    def __init__(
        self,
        xs: Sequence[Any],
        dimensions: Mapping[int, int],
        ahead: PrefetchedStacks,
    ) -> None:
        self._ahead, self._dimensions, self._xs = ahead, dimensions, xs

    def layers(self, come: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the layers that an iteration stacks: those that the previous one has gathered
        for it, in the layout of the collective."""
        if not self._dimensions:
            return []
        unsharded = self._ahead.unsharded(come)
        chosen = [(x, d) for i, d in self._dimensions.items() if (x := unsharded[i]) is not None]
        return [jnp.moveaxis(x, d - 1, 0) for x, d in chosen]

    def filled(self, stacks: Sequence[jax.Array]) -> list[tuple[Shard, Shard]]:
        """Returns each shard with its gathered version, from the layers that all iterations have
        stacked."""
        pairs = []
        for (i, d), stack in zip(self._dimensions.items(), stacks, strict=True):
            moved, x = FilledStack(stack, d), self._xs[i]
            pairs.append((x, x.with_copy(moved.unsharded, moved).with_gathering(by_loop=False)))
        return pairs
