"""Evaluations under pipeline stages, whose loops over layers run as those of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.extend import core

from zerojax.accumulation.roles import Roles
from zerojax.devices.mesh import STAGE, batch_devices
from zerojax.graph.def_use import graph_of
from zerojax.pipeline.program import Pipeline
from zerojax.pipeline.schedule import Schedule
from zerojax.plan import layout
from zerojax.plan.state_sharding import Plan
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Shaped


class Stages(NamedTuple):
    """The pipeline stages of an evaluated function.

    Attributes:
      name: The function's name.
      plan: The plan of the state; parameters are the function's first arguments.
      schedule: The schedule of a step; an evaluation has at most as many micro-batches.
      warn: Logs a message once.
    """

    name: str
    plan: Plan
    schedule: Schedule
    warn: Callable[[str], None]

    def __call__(
        self, closed: AnyJaxpr, trace: Callable[[int], AnyJaxpr], rows: Sequence[bool]
    ) -> AnyJaxpr:
        """Returns the program with pipelines in place of its loops over layers; the program
        itself, with a warning, if the stages cannot share its layers.

        Args:
          closed: The program on rows that all devices share equally.
          trace: Returns the program on another number of rows.
          rows: For each argument, whether its first dimension holds the rows.
        """
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        # Specs at rest have no None at their end, and may be empty.
        staged = [STAGE in layout.axes((*x.spec, None)[0]) for x in self.plan.compute]
        graph = graph_of(jaxpr)
        read = [s and bool(graph.users(v)) for s, v in zip(staged, jaxpr.invars, strict=False)]
        if not any(read):
            return closed
        at = [i for i, has_rows in enumerate(rows) if has_rows]
        batch = [jaxprs.like(jaxpr.invars[i].aval) for i in at]
        paths = [leaf.path for leaf in self.plan.compute]
        roles = Roles(self.name, frozenset(range(len(paths))), at, (), (), paths)

        def smaller(batch: Sequence[Shaped]) -> tuple[AnyJaxpr, None]:
            return trace(batch[0].shape[0]), None

        n, devices = batch[0].shape[0], batch_devices(self.schedule.mesh)
        try:
            if n % devices or any(x.shape[0] != n for x in batch):
                raise ValueError(f"{devices} devices cannot share the batch equally")
            schedule = self._schedule(n // devices)
            pipeline = Pipeline(closed, smaller, batch, roles, staged, schedule, None)
            return core.ClosedJaxpr(*pipeline.traced())  # type: ignore[arg-type]
        except ValueError as refusal:
            layers = sum(x.bytes for x, r in zip(self.plan.compute, read, strict=True) if r)
            self.warn(
                f"evaluate: the layers of all stages ({layers / 1e9:.3g} GB) are gathered on "
                f"every device. {str(refusal).rstrip('.')}"
            )
            return closed

    def _schedule(self, each: int) -> Schedule:
        """Returns the schedule for ``each`` rows of every device: a stage has as many micro-batches
        as divide them, at most those of a step."""
        most = max(1, self.schedule.micro_batches // self.schedule.stages)
        slots = max(n for n in range(1, most + 1) if each % n == 0)
        return self.schedule._replace(micro_batches=self.schedule.stages * slots)
