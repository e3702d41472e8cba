"""The check before a step's first run whether the step fits into device memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import micro_batch_devices
from zerojax.devices.rates import Rates, rates_of
from zerojax.distributed import log
from zerojax.foresight.choice import Choice, changes
from zerojax.foresight.costs import forecast, measure_memory
from zerojax.foresight.devices import free_bytes
from zerojax.foresight.remedies import remedies
from zerojax.foresight.trials import BuiltStep, Trials
from zerojax.plan.places import offloads
from zerojax.plan.state_sharding import Plan
from zerojax.plan.table import size
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree

Other = tuple[Plan, Callable[[], Iterable[LoweredProgram]]]


class OutOfMemoryError(MemoryError):
    """The error for a step that needs more memory than the devices have; the step has not run."""


class Guard:
    """A comparison of the memory that a step needs with the free memory.

    Args:
      config: The step's config.
      mesh: The step's mesh.
      other: Returns the same step under another config, for an abstract state and batch: its plan,
        and its programs, which are traced on demand.
      free: Returns the free bytes of the fullest device of a mesh, or None if unknown.
    """

    def __init__(
        self,
        config: ZeroConfig,
        mesh: Mesh,
        other: Callable[..., Other],
        free: Callable[[Mesh], int | None] = free_bytes,
    ) -> None:
        self._config, self._mesh, self._world = config, mesh, micro_batch_devices(mesh)
        self._other, self._free = other, free

    def check(
        self,
        programs: Callable[[], Iterable[LoweredProgram]],
        plan: Plan,
        batch_bytes: int,
        *step: object,
    ) -> bool:
        """Raises an error if a step does not fit.

        The check compiles the step; jax keeps the executable for the run, so that the check costs
        no second compile. If the step does not fit, the check compiles other settings to find some
        that fit, which may take minutes.

        Args:
          programs: The programs of the step.
          plan: The plan of its state, which is already on the devices.
          batch_bytes: Bytes of a device's share of the batch, which is on the devices too.
          *step: Arguments of ``other`` after the config: the function, its objects, the batch,
            and its other arguments.

        Returns:
          Whether the step fits only with the options that save memory.

        Raises:
          OutOfMemoryError: The step does not fit. The message states the required and the available
            memory, the memory by use, and settings that fit.
        """
        free = self._free(self._mesh)
        if free is None:
            return False
        room = free + plan.bytes_per_device + batch_bytes
        rates = rates_of(self._mesh.devices.flat[0], room)
        measured = functools.partial(measure_memory, several=offloads(self._config))
        peak = forecast(programs(), plan, rates, measured=measured).peak
        if peak.bytes <= room:
            return peak.compile.saving
        try:
            advice = self._advice(rates, *step)
        except Exception as error:  # a failure of the search must not hide the result of the check
            advice = f"Settings that fit were not found: {type(error).__name__}: {error}"
        raise OutOfMemoryError(
            f"not run: the step needs {size(peak.bytes)} on each device, of {size(room)}.\n{advice}"
        )

    def _advice(
        self, rates: Rates, function: Any, objects: PyTree, batch: PyTree, *rest: object
    ) -> str:
        if jax.process_count() > 1:
            return "`zerojax plan` shows what takes memory, and settings that fit."

        def build(choice: Choice) -> BuiltStep:
            config = choice.config(self._config, self._world)
            return BuiltStep(*self._other(config, function, objects, batch, *rest), 0)

        batch_axis = function.signature.batch_axis
        rows = next(x.shape[batch_axis] for x in jax.tree.leaves(batch) if x.shape)
        given = Choice.of(self._config, rows, self._world)
        trials = Trials(build, given, rates, _log_progress)
        peak = trials.forecast(given).peak
        by_size = sorted(peak.memory.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {size(n)}" for kind, n in by_size if n >= peak.bytes / 100)
        settings = [
            f"  {', '.join(changes(given, remedy.choice))}: {size(remedy.forecast.peak.bytes)}"
            for remedy in remedies(trials, wanted=2)
        ]
        advice = (
            "These settings fit, each compiled, the fastest first by prediction:"
            if settings
            else "No stage, micro-batch or offload was found that fits with the same batch: use "
            "jax.checkpoint or nn.remat on the model's blocks, more devices, or a smaller batch."
        )
        return "\n".join([f"Its program {peak.name!r} takes {parts}.", advice, *settings])


def _log_progress(text: str) -> None:
    if log.is_first():
        print(f"zerojax: the step does not fit; compiling {text}", file=sys.stderr)
