"""Which parameters stay gathered over an update, at stage 3.

A parameter that is gathered where it is used, and dropped, takes two gathers a micro-batch: for the
forward and for the backward pass. One that stays gathered takes one an update, and its whole size
on every device meanwhile.

``stage3_max_live_parameters`` says how many elements stay gathered. The largest parameters come
first, each whole or not at all: a stack of layers is one. ``stage3_max_reuse_distance`` says how
many elements of others may be used between two uses of one that stays. No more than all others lie
there, each in a forward and a backward pass; which of them do is not known before the step is
traced, so all count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import axis_size, batch_devices
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import DEVICE
from zerojax.plan.rule import is_small
from zerojax.plan.table import size


class Live:
    """The parameters that stay gathered; none below stage 3, where all do, and under offload.

    Args:
      config: Says how many stay, and how far apart two uses may be.
      compute: All parameters, as the step computes with them.
      mesh, axis: The devices, and the axis over which parameters are gathered.

    Attributes:
      leaves: Those that stay, as each device holds them during an update.
    """

    def __init__(self, config: ZeroConfig, compute: Sequence[Leaf], mesh: Mesh, axis: str) -> None:
        self._config, self._mesh, self._axis = config, mesh, axis
        self._total = sum(map(_elements, compute))
        drops = config.stage == 3 and config.offload_param is None
        self._able = [leaf for leaf in compute if self._may_stay(leaf)] if drops else []
        chosen = self._chosen()
        self.leaves = tuple(
            Leaf.of(leaf.path, leaf, whole, whole, "", mesh)
            for leaf in self._able
            if leaf.path in chosen
            for whole in [layout.full(leaf.whole, len(leaf.shape))]
        )

    def __bool__(self) -> bool:
        return bool(self.leaves)

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(leaf.path for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """Elements of all in all."""
        return sum(map(_elements, self.leaves))

    @property
    def bytes(self) -> int:
        """Bytes of each device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def saved(self) -> int:
        """Bytes that each device receives less in an update.

        Two gathers a micro-batch become one an update. A table that is only looked up is gathered
        once a micro-batch, so that for one the bytes are fewer.
        """
        devices = axis_size(self._mesh, self._axis)
        micro_batches = self._config.batch(batch_devices(self._mesh)).accumulation
        return (2 * micro_batches - 1) * self.bytes * (devices - 1) // devices

    @property
    def notes(self) -> list[str]:
        """What stays gathered and why no more, in a sentence; none where nothing may stay."""
        most, farthest = self._asked
        if not most or not self._able:
            return []
        asked = f"stage3_max_live_parameters = {most:,}"
        if self:
            return [
                f"{asked}: {len(self.leaves)} parameters of {self.elements:,} elements stay "
                f"gathered over an update, {size(self.bytes)} on each device; up to "
                f"{size(self.saved)} less are gathered"
            ]
        sizes = [*map(_elements, self._able)]
        why = f"the smallest parameter has {min(sizes):,} elements"
        if min(sizes) <= most and farthest is not None:
            why = (
                f"up to {2 * (self._total - max(sizes)):,} elements of others lie between two "
                f"uses, and stage3_max_reuse_distance is {farthest:,}"
            )
        return [f"{asked}: nothing stays gathered, because {why}"]

    @property
    def _asked(self) -> tuple[int, int | None]:
        config = self._config
        return config.stage3_max_live_parameters, config.stage3_max_reuse_distance

    def _may_stay(self, leaf: Leaf) -> bool:
        """Whether a parameter is gathered at each use; small ones are gathered once anyway."""
        spec: Spec = layout.full(leaf.spec, len(leaf.shape))
        return leaf.sharded and leaf.place == DEVICE and not is_small(leaf.shape, spec, self._axis)

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
