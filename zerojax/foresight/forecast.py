"""The cost of a step on each device: memory by kind, traffic and predicted time.

:func:`zerojax.foresight.costs.forecast` computes a :class:`Forecast`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from zerojax.devices.mesh import micro_batch_devices
from zerojax.devices.rates import Rates
from zerojax.devices.topology import device_kinds, gpus_per_host, lookup
from zerojax.pipeline.schedule import Schedule
from zerojax.plan.state_sharding import Plan
from zerojax.xla.compiler import SLOP, memory_limit

RECOMPUTES = 1e-3
"""The share of a step from which the time of values that XLA computes again counts."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, or the copies in one direction, of an entire step.

    Attributes:
      kind: "all-gather", ..., "to the device", "to the host".
      dtypes: The dtypes moved, in descending order of bytes; empty for copies.
      times: The number of runs in a step.
      bytes: Bytes that each device sends (or copies) in a step.
      between_nodes: The part of ``bytes`` that leaves the device's node.
      seconds: Seconds for which transfers are under way.
      waited: The part of ``seconds`` that no computation hides.
    """

    kind: str
    dtypes: tuple[str, ...]
    times: int
    bytes: int
    between_nodes: int
    seconds: float
    waited: float

    @property
    def hidden(self) -> float:
        """The fraction of the seconds that computation hides, 0 to 1."""
        return max(0.0, 1 - self.waited / self.seconds) if self.seconds else 1.0


@dataclasses.dataclass(frozen=True)
class Again:
    """The values that XLA computes again to save memory, see :mod:`zerojax.hlo.rematerialised`.

    Attributes:
      instructions: The number of instructions that do so.
      bytes: Bytes of these values.
      seconds: The part of the program's time that they take.
    """

    instructions: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Compile:
    """The compile of a program.

    Attributes:
      seconds: Its time, on this machine.
      refused: True if XLA refused the program for its memory.
      saving: Whether the program fits only with XLA's own limit of memory and rematerialization,
        which its options change otherwise.
      rematerializes: Whether XLA's rematerialization is part of the compile.
      slop: The value of XLA's option for its limit of memory.
    """

    seconds: float = 0.0
    refused: bool = False
    saving: bool = False
    rematerializes: bool = True
    slop: int = SLOP


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """Figures of one run of a compiled program on each device, in bytes and seconds.

    Attributes:
      memory: Device memory by kind, see :mod:`zerojax.foresight.attribution`; if XLA refused the
        program, the least that it needs.
      seconds: Predicted time.
      forward: Floating-point operations of the forward pass's matrix products, without their
        repetition in the backward pass.
      traffic: Collectives, then copies.
      boundary: Bytes of the largest array that devices send to their neighbours by
        ``lax.ppermute``, as pipeline stages do.
      arguments: Bytes of the program's arguments on the device.
      again: The values that XLA computes again.
      compile: The compile.
    """

    memory: Mapping[str, int]
    seconds: float = 0.0
    forward: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    boundary: int = 0
    arguments: int = 0
    again: Again = Again()
    compile: Compile = Compile()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost(CompiledProgram):
    """The cost of one program of a step.

    Attributes:
      name: The program's name in ``train_step.programs``.
      host: Host memory beyond what is stored there between programs.
      times: Runs in a step.
    """

    name: str
    host: int
    times: int = 1

    @property
    def bytes(self) -> int:
        """Total device memory."""
        return sum(self.memory.values())


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The cost of a step on each device, in bytes and seconds.

    Attributes:
      plan: The plan of the step's state.
      rates: The speeds and the memory of the devices.
      parameters: The number of parameters of the model.
      tokens: Tokens in a step, over all devices; 0 for a batch without tokens.
      programs: The costs of the step's programs, in the order of their runs.
      host_bytes: Host memory for each device.
      disk_bytes: Disk space for each device.
      is_complete: Whether ``programs`` is complete; programs after one that does not fit may be
        skipped.
    """

    plan: Plan = dataclasses.field(repr=False)
    rates: Rates
    parameters: int
    tokens: int
    programs: tuple[ProgramCost, ...]
    host_bytes: int
    disk_bytes: int
    is_complete: bool = True

    @property
    def devices(self) -> int:
        return self.plan.mesh.devices.size

    @property
    def row_devices(self) -> int:
        """The number of devices over which the rows of a micro-batch are split."""
        return micro_batch_devices(self.plan.mesh)

    @property
    def peak(self) -> ProgramCost:
        """The program that needs the most device memory."""
        return max(self.programs, key=lambda program: program.bytes)

    @property
    def headroom(self) -> int:
        """Bytes of device memory left at the peak; negative if the step does not fit."""
        return self.rates.room - self.peak.bytes

    @property
    def fits(self) -> bool:
        return self.headroom >= 0 and not any(each.compile.refused for each in self.programs)

    @property
    def recomputes_above(self) -> int | None:
        """Bytes at the peak above which XLA computes values again; None if it does not, as on TPUs,
        and in programs whose options leave it out."""
        if self.rates.kind not in device_kinds()["gpu"] or not self.peak.compile.rematerializes:
            return None
        return memory_limit(self.rates.memory, self.peak.arguments, self.peak.compile.slop)

    @property
    def seconds_again(self) -> float:
        """The part of ``seconds`` in which XLA computes values again to save memory."""
        return sum(each.times * each.again.seconds for each in self.programs)

    @property
    def bytes_again(self) -> int:
        """Bytes of the values that XLA computes again in a step."""
        return sum(each.times * each.again.bytes for each in self.programs)

    @property
    def recomputes(self) -> bool:
        """True if XLA's own rematerialisation takes a noticeable part of the step."""
        return self.seconds_again > RECOMPUTES * self.seconds

    @property
    def spare(self) -> int:
        """Additional bytes that the step could use and still fit, without values computed again."""
        limit = self.recomputes_above
        return self.headroom if limit is None else min(self.headroom, limit - self.peak.bytes)

    @property
    def seconds(self) -> float:
        """Predicted time of a step; the disk is read and written once a step, in parallel."""
        devices_per_host = min(self.devices, gpus_per_host(lookup(self.rates.kind)[1]))
        disk_seconds = 2 * self.disk_bytes * devices_per_host / self.rates.disk
        return max(sum(each.times * each.seconds for each in self.programs), disk_seconds)

    @property
    def boundary(self) -> int:
        """Bytes of the largest array that devices send to their neighbours by ``lax.ppermute`` in a
        loop."""
        return max(each.boundary for each in self.programs)

    @property
    def network_share(self) -> float:
        """The share of a step that waits for transfers between nodes."""
        waited = sum(each.waited for each in self.traffic if each.between_nodes)
        return waited / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, appendix B, arXiv:2204.02311): 3 times the FLOPs of the
        forward pass's matrix products / (the step's time * the highest matrix rate). Under pipeline
        stages without the share of idle ticks, whose results are unused; the products outside of
        the pipeline's loops, as the head's, are scaled alike."""
        model_flops = 3 * sum(each.times * each.forward for each in self.programs)
        mesh, config = self.plan.mesh, self.plan.config
        accumulation = config.batch(self.row_devices).accumulation
        if schedule := Schedule.of(mesh, accumulation):
            model_flops *= 1 - schedule.bubble
        return model_flops / (self.seconds * self.rates.peak)

    @property
    def compile_seconds(self) -> float:
        return sum(each.compile.seconds for each in self.programs)

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of all programs, by kind."""
        return sum_traffic(
            (each, program.times) for program in self.programs for each in program.traffic
        )


SUMMED = ("times", "bytes", "between_nodes", "seconds", "waited")
"""The fields of :class:`Traffic` that add up."""


def sum_traffic(parts: Iterable[tuple[Traffic, int]]) -> tuple[Traffic, ...]:
    """Returns the sum of traffics, each with the number of its runs, by kind."""
    kinds: dict[str, list[tuple[Traffic, int]]] = collections.defaultdict(list)
    for part, runs in parts:
        kinds[part.kind].append((part, runs))
    sums = []
    for kind, group in kinds.items():
        sizes = collections.Counter[str]()
        for part, runs in group:
            sizes.update(dict.fromkeys(part.dtypes, runs * part.bytes))
        totals = {name: sum(runs * getattr(part, name) for part, runs in group) for name in SUMMED}
        sums.append(Traffic(kind, tuple(dtype for dtype, _ in sizes.most_common()), **totals))
    return tuple(sums)
