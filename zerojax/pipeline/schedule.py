"""The order in which pipeline stages run micro-batches."""

from __future__ import annotations

import math
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from zerojax.devices.mesh import STAGE, batch_axes, stage_size


class Schedule(NamedTuple):
    """GPipe over the axis "stage" of a mesh (Huang et al., 2019, arXiv:1811.06965).

    At tick t the p-th stage from the entrance runs micro-batch t - p: M micro-batches pass S stages
    in M + S - 1 ticks. Of these ticks every stage idles for S - 1.

    Attributes:
      mesh: The devices.
      micro_batches: Micro-batches a step, M, a multiple of the stages.
    """

    mesh: Mesh | AbstractMesh
    micro_batches: int

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, micro_batches: int) -> Schedule | None:
        """Returns the schedule on a mesh, of as many micro-batches or the least multiple of both
        them and the stages; None if the mesh has no pipeline stages."""
        stages = stage_size(mesh)
        return None if stages == 1 else cls(mesh, math.lcm(micro_batches, stages))

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return int(self.mesh.shape[STAGE])

    @property
    def slots(self) -> int:
        """Micro-batches whose inputs and outputs one stage holds: M / S."""
        return self.micro_batches // self.stages

    @property
    def ticks(self) -> int:
        """Ticks of all passes forward, and of all passes backward."""
        return self.micro_batches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the ticks in which a stage idles, (S - 1) / (M + S - 1)."""
        return (self.stages - 1) / self.ticks

    @property
    def advice(self) -> str:
        """A warning of stages that idle for more than a third of the ticks; "" for no warning."""
        if 3 * (self.stages - 1) <= self.ticks:
            return ""
        # With M = 4 (S - 1) a stage idles for a fifth of the ticks.
        more = self._replace(micro_batches=self.stages * -(-4 * (self.stages - 1) // self.stages))
        return (
            f"with {self.stages} pipeline stages and {self.micro_batches} micro-batches "
            f"each stage idles {self.bubble:.0%} of the time in the loops "
            f"over layers: gradient_accumulation_steps = {more.micro_batches} lowers that to "
            f"{more.bubble:.0%}"
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard the rows of a batch, "stage" included, in the mesh's order."""
        return batch_axes(self.mesh)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes that shard the rows of a micro-batch."""
        return tuple(axis for axis in self.axes if axis != STAGE)

    @property
    def parts(self) -> int:
        """The number of parts of a batch: the rows of one device in one micro-batch each."""
        return self.micro_batches * self.row_devices

    @property
    def row_devices(self) -> int:
        """The number of devices that share the rows of a micro-batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)
