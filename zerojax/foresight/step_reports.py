"""The reports on a step that are logged once: its memory, its collectives, its FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.network import nodes_of
from zerojax.devices.rates import kind_of, rates, rates_of
from zerojax.foresight import comms_logger, flops_profiler, memory_breakdown
from zerojax.foresight.costs import forecast, measure_memory, records_graphs
from zerojax.hlo.origins import by_origin
from zerojax.hlo.program import parse
from zerojax.hlo.timeline import program_time
from zerojax.hlo.traffic import Collective, collectives
from zerojax.hlo.transfers import host_copies
from zerojax.monitor import lines
from zerojax.plan.state_sharding import Plan
from zerojax.xla.lowered import LoweredProgram


class StepReports:
    """The tables of ``memory_breakdown``, ``comms_logger`` and ``flops_profiler``.

    The tables describe the programs that run, which are not compiled again; only process 0 logs
    them. They do not affect the results of a step.

    Args:
      config: The config, which selects the tables.
      mesh: The step's mesh.
    """

    def __init__(self, config: ZeroConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._kind = kind_of(mesh.devices.flat[0])
        self._calls, self._begun = 0, 0.0
        self._modules, self._waited = flops_profiler.Module(), 0.0

    @staticmethod
    def asked(config: ZeroConfig) -> bool:
        """Returns whether a config asks for any table."""
        return bool(config.memory_breakdown or config.comms_logger or config.flops_profiler)

    def begin(
        self, programs: Callable[[], Iterable[LoweredProgram]], plan: Plan, given: object
    ) -> None:
        """Before the first step, compiles it and logs its tables; waits for a timed step's inputs.

        Args:
          programs: The programs of the step.
          plan: The plan of its state.
          given: The state and the batch.

        Raises:
          OSError: Before the first step, ``output_file`` cannot be written.
        """
        profiler = self._config.flops_profiler
        if not self._calls:
            if profiler and profiler.output_file and jax.process_index() == 0:
                path = Path(profiler.output_file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            self._read(list(programs()), plan)
        if profiler and self._calls == profiler.profile_step:
            jax.block_until_ready(given)
            self._begun = time.perf_counter()

    def end(self, result: object) -> None:
        """After the timed step, waits for the result and logs or writes the profile.

        Args:
          result: The results of the step.
        """
        profiler = self._config.flops_profiler
        if profiler and self._calls == profiler.profile_step:
            jax.block_until_ready(result)
            seconds = time.perf_counter() - self._begun
            text = flops_profiler.table(
                self._modules, profiler, seconds, self._kind or "", self._waited
            )
            if profiler.output_file is None:
                _log(text)
            elif jax.process_index() == 0:
                Path(profiler.output_file).write_text(f"{text}\n")
        self._calls += 1

    def _read(self, programs: list[LoweredProgram], plan: Plan) -> None:
        config, nodes = self._config, nodes_of(self._mesh)
        speeds = None if self._kind is None else rates(self._kind)
        stand_in = rates_of(self._mesh.devices.flat[0], 0)  # a memory forecast needs no speeds
        memory_forecast = forecast(programs, plan, stand_in, measured=measure_memory)
        if config.memory_breakdown:
            _log(memory_breakdown.table(memory_forecast))
        sent: list[tuple[Collective, int]] = []
        self._modules = flops_profiler.modules(plan.leaves["params"])
        for each in programs:
            text = each.lowered.compile().as_text() or ""
            program, program_collectives = parse(text), collectives(text)
            sent += ((collective, each.times) for collective in program_collectives)
            flops_profiler.attributed(self._modules, by_origin(program, speeds), each.times)
            if speeds is not None:
                spent = program_time(
                    program, program_collectives, host_copies(text), speeds, nodes,
                    records_graphs=records_graphs(each.lowered),
                )  # fmt: skip
                self._waited += each.times * sum(spent.waited.values())
        if config.comms_logger:
            _log(comms_logger.table(sent, config.comms_logger, speeds, nodes))


def _log(text: str) -> None:
    if jax.process_index() == 0:
        lines.say(text)
