"""The choice of the parameters that stay gathered for an entire update, at stage 3.

A parameter that is gathered at each use and then dropped takes two gathers a micro-batch, for the
forward and for the backward pass. A parameter that stays gathered takes one gather an update, and
its unsharded size on every device until the end of the update.

``stage3_max_live_parameters`` limits the elements that stay gathered. The largest parameters are
chosen first, each entirely or not at all: a stack of layers counts as one parameter.
``stage3_max_reuse_distance`` limits the elements of other parameters that are used between two uses
of a parameter that stays. At most all others are used in between, each in a forward and a backward
pass. The step has not been traced yet, so the limit is compared with this maximum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import axis_size, micro_batch_devices, zero_axis
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import DEVICE
from zerojax.plan.rule import is_small
from zerojax.plan.table import size


class Live:
    """The parameters that stay gathered; empty below stage 3, where all do, and if the config
    offloads parameters.

    Args:
      config: The limits on the number of elements and on the distance between two uses.
      compute: All parameters, as the step computes with them.
      mesh: The devices.

    Attributes:
      leaves: The parameters that stay, as each device stores them during an update.
    """

    def __init__(self, config: ZeroConfig, compute: Sequence[Leaf], mesh: Mesh) -> None:
        self._config, self._mesh, self._axis = config, mesh, zero_axis(mesh)
        self._total = sum(map(_elements, compute))
        drops = config.stage == 3 and config.offload_param is None
        self._able = [leaf for leaf in compute if self._may_stay(leaf)] if drops else []
        chosen = self._chosen()
        self.leaves: tuple[Leaf, ...] = tuple(
            leaf.with_spec(leaf.own_spec, mesh) for leaf in self._able if leaf.path in chosen
        )

    def __bool__(self) -> bool:
        return bool(self.leaves)

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        """The paths of the parameters that stay gathered."""
        return frozenset(leaf.path for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """The number of elements that stay gathered."""
        return sum(map(_elements, self.leaves))

    @property
    def bytes(self) -> int:
        """The bytes that each device stores for them."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def saved(self) -> int:
        """The bytes that each device no longer receives in an update, at most.

        Two gathers a micro-batch become one gather an update. A table that is only looked up would
        be gathered once a micro-batch, and saves less.
        """
        devices = axis_size(self._mesh, self._axis)
        micro_batches = self._config.batch(micro_batch_devices(self._mesh)).accumulation
        return (2 * micro_batches - 1) * self.bytes * (devices - 1) // devices

    @property
    def notes(self) -> list[str]:
        """A sentence on what stays gathered, or why nothing does; none if no parameter may stay."""
        most, farthest = self._asked
        if not most or not self._able:
            return []
        setting = f"stage3_max_live_parameters = {most:,}"
        if self:
            return [
                f"{setting}: {len(self.leaves)} parameters of {self.elements:,} elements stay "
                f"gathered over an update, {size(self.bytes)} on each device; up to "
                f"{size(self.saved)} less are gathered"
            ]
        sizes = [*map(_elements, self._able)]
        why = f"the smallest parameter has {min(sizes):,} elements"
        if min(sizes) <= most and farthest is not None:
            why = (
                f"up to {2 * (self._total - max(sizes)):,} elements of others come between two "
                f"uses, and stage3_max_reuse_distance is {farthest:,}"
            )
        return [f"{setting}: nothing stays gathered, because {why}"]

    @property
    def _asked(self) -> tuple[int, int | None]:
        config = self._config
        return config.stage3_max_live_parameters, config.stage3_max_reuse_distance

    def _may_stay(self, leaf: Leaf) -> bool:
        """Returns whether a parameter is gathered at each use; small ones are gathered once."""
        small = is_small(leaf.shape, leaf.full_spec, self._axis, self._config.small_array_size)
        return leaf.sharded and leaf.place == DEVICE and not small

    def _chosen(self) -> set[str]:
        room, farthest = self._asked
        chosen = set()
        for leaf in sorted(self._able, key=_elements, reverse=True):
            n = _elements(leaf)
            if n <= room and (farthest is None or 2 * (self._total - n) <= farthest):
                chosen.add(leaf.path)
                room -= n
        return chosen


def _elements(leaf: Leaf) -> int:
    return math.prod(leaf.shape)
