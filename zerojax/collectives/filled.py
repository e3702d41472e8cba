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
from jax import lax

from zerojax.collectives.ahead import PrefetchedStacks
from zerojax.collectives.shard import FilledStack, Shard


class GatheredStacks:
    """The stacks that a loop gathers and stacks.

    Args:
      xs: The stacks that the loop reads.
      dimensions: By position of a stack that the loop gathers, the dimension along which the stack
        is sharded.
      ahead: The stacks that the loop reads ahead.
      reverse: Whether the loop starts with the last layer.
    """

    def __init__(
        self,
        xs: Sequence[Any],
        dimensions: Mapping[int, int],
        ahead: PrefetchedStacks,
        *,
        reverse: bool,
    ) -> None:
        self._ahead, self._reverse = ahead, reverse
        self._dimensions, self._xs = dimensions, xs

    def layers(self, coming: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the layers that an iteration stacks: those that it has gathered for the next
        iteration, in the layout of the collective."""
        if not self._dimensions:
            return []
        unsharded = self._ahead.unsharded(coming)
        chosen = [(x, d) for i, d in self._dimensions.items() if (x := unsharded[i]) is not None]
        return [jnp.moveaxis(x, d - 1, 0) for x, d in chosen]

    def filled(
        self, first: Sequence[jax.Array], stacks: Sequence[jax.Array]
    ) -> list[tuple[Shard, Shard]]:
        """Returns each shard with its gathered version, from the layers that the first iteration
        received, and those that all iterations have stacked. The last iteration re-gathers its own
        layer; that result is unused."""
        ahead, last = (-1, 0) if self._reverse else (1, -1)
        pairs = []
        for (i, d), layer, stack in zip(
            self._dimensions.items(), self.layers(first), stacks, strict=True
        ):
            stack = lax.dynamic_update_index_in_dim(stack, layer, last % len(stack), 0)
            moved = FilledStack(stack, d, ahead)
            x = self._xs[i]
            pairs.append((x, x.with_copy(moved.unsharded, moved).with_gathering(by_loop=False)))
        return pairs
