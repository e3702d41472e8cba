"""The order in which pipeline stages run micro-batches."""

from __future__ import annotations

import math
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from zerojax.devices.mesh import STAGE, batch_axes, nearest_multiples, stage_size


class Schedule(NamedTuple):
    """GPipe over the axis "stage" of a mesh (Huang et al., 2019, arXiv:1811.06965), or 1F1B
    (:mod:`zerojax.pipeline.one_f_one_b`).

    At tick t the p-th stage from the entrance runs micro-batch t - p: M micro-batches pass S stages
    in M + S - 1 ticks. Of these ticks every stage idles for S - 1.

    Attributes:
      mesh: The devices.
      micro_batches: Micro-batches a step, M.
      joined: Whether the passes forward and backward share ticks (1F1B).
    """

    mesh: Mesh | AbstractMesh
    micro_batches: int
    joined: bool = False

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh, micro_batches: int, order: str = "gpipe"
    ) -> Schedule | None:
        """Returns the schedule on a mesh; None if the mesh has no pipeline stages.

        Args:
          order: "gpipe" or "1f1b".

        Raises:
          ValueError: With 1F1B the stages do not divide the micro-batches.
        """
        if stage_size(mesh) == 1:
            return None
        schedule = cls(mesh, micro_batches, order == "1f1b")
        if schedule.joined and not schedule.is_even:
            raise ValueError(
                f'pipeline.schedule = "1f1b" needs micro-batches that the {schedule.stages} stages '
                f"divide, not gradient_accumulation_steps = {micro_batches}: take "
                f"{nearest_multiples(micro_batches, schedule.stages)}, or "
                'pipeline.schedule = "gpipe".'
            )
        return schedule

    @property
    def name(self) -> str:
        """The name of the schedule in the literature."""
        return "1F1B" if self.joined else "GPipe"

    @property
    def kept(self) -> int:
        """Micro-batches of which a stage keeps what their backward pass needs: M, or with 1F1B at
        most 2 S - 1."""
        most = self.micro_batches
        return min(most, 2 * self.stages - 1) if self.joined else most

    @property
    def kept_slots(self) -> int:
        """Slots for what a stage keeps: one more for idle ticks if all micro-batches have one."""
        return self.kept + (self.kept == self.micro_batches)

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return int(self.mesh.shape[STAGE])

    @property
    def slots(self) -> int:
        """Micro-batches whose inputs and outputs one stage holds: M / S, rounded up."""
        return -(-self.micro_batches // self.stages)

    @property
    def is_even(self) -> bool:
        """True if every stage holds equally many micro-batches."""
        return self.micro_batches % self.stages == 0

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
        more = self._replace(micro_batches=self.stages * -(-4 * (self.stages - 1) // self.stages))
        return (
            f"with {self.stages} pipeline stages and gradient_accumulation_steps = "
            f"{self.micro_batches} every stage idles for {self.bubble:.0%} of the loops over "
            f"layers: gradient_accumulation_steps = {more.micro_batches} lowers that to "
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
    def row_devices(self) -> int:
        """The number of devices that share the rows of a micro-batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)
