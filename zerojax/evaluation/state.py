"""The arrays that an evaluation reads, each where the plan places it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.placement.states import States, is_placed
from zerojax.plan.places import offloads
from zerojax.plan.state_sharding import Plan
from zerojax.plan.stored import unwrap_stored
from zerojax.train_state.state_parts import Parts


class StateReader:
    """A reader that places a state's arrays where the program takes them.

    Arrays that are already there are used unchanged. Others, such as those of a state that has not
    been through zerojax, are placed, and the placed array is reused for as long as the same one
    comes again.

    Args:
      states: Shards and places states as the config asks.
      plan: PartitionSpec and place of every leaf.

    Attributes:
      copies: Compute parameters that are stored beside the state, under offload; else None.
    """

    def __init__(self, states: States, plan: Plan) -> None:
        self._states, self._plan = states, plan
        self._where = list(zip(jax.tree.leaves(plan.shardings()), plan.all_leaves(), strict=True))
        self._placed: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self.copies = states.placer.copies(plan) if offloads(plan.config) else None

    def __call__(self, parts: Parts, used: Sequence[bool]) -> list[Any]:
        """Returns the arrays of a state at rest in order, with compute parameters in place of
        masters where copies exist; None for arrays that are not used.

        Raises:
          ValueError: The state is placed on another mesh.
        """
        n = len(self._plan.compute)
        copies = self.copies if any(used[:n]) else None
        read = used if copies is None else (*[True] * n, *used[n:])  # copies exist of all or none
        leaves = jax.tree.leaves(parts)
        placed = [unwrap_stored(self._at(i, x)) if read[i] else None for i, x in enumerate(leaves)]
        if copies is not None:
            placed[:n] = copies.of(placed[:n])
        return placed

    def _at(self, i: int, x: Any) -> Any:
        sharding, leaf = self._where[i]
        if is_placed(x, sharding, leaf):
            self._placed.pop(i, None)
            return x
        ref, placed = self._placed.get(i, (lambda: None, None))
        if ref() is x:
            return placed
        self._states.check_mesh({leaf.path: x})
        placed = self._states.placer.put(x, sharding, leaf)
        if x.ndim:
            self._placed[i] = weakref.ref(x), placed
        return placed
