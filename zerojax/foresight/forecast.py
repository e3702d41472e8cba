"""What a step costs each device: memory by kind, traffic and predicted time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from zerojax.devices.rates import Rates
from zerojax.devices.topology import GPUS_PER_HOST
from zerojax.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective, or the copies in one direction, of a whole step.

    Attributes:
      kind: "all-gather", ..., "to the device", "to the host".
      dtypes: of what is moved, most bytes first; empty for copies.
      times: how many a step.
      bytes: each device sends (or copies) in a step.
      seconds: for which they are under way.
      waited: of them, those that no computation hides.
    """

    kind: str
    dtypes: tuple[str, ...]
    times: int
    bytes: int
    seconds: float
    waited: float

    def repeated(self, times: int) -> Traffic:
        """The same so often."""
        return dataclasses.replace(
            self,
            times=times * self.times,
            bytes=times * self.bytes,
            seconds=times * self.seconds,
            waited=times * self.waited,
        )

    @property
    def hidden(self) -> float:
        """The share that runs beside computation, 0 to 1."""
        return max(0.0, 1 - self.waited / self.seconds) if self.seconds else 1.0


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """What one compiled program takes of each device. Bytes and seconds.

    Attributes:
      name: as ``train_step.programs`` calls it.
      memory: bytes of the device's memory by kind, see :mod:`zerojax.foresight.attribution`.
      host: bytes of host memory beside what lies there between programs.
      seconds: predicted for one run, of which ``computing`` in kernels.
      flops: of matrix products, of which ``forward`` in the forward pass, as first computed.
      traffic: collectives, then copies.
      compile_seconds: on this machine.
      times: how often it runs in a step.
      made: False where XLA refused it for its memory, of which ``memory`` is the least.
    """

    name: str
    memory: Mapping[str, int]
    host: int
    seconds: float
    computing: float
    flops: float
    forward: float
    traffic: tuple[Traffic, ...]
    compile_seconds: float
    times: int = 1
    made: bool = True

    @property
    def bytes(self) -> int:
        """Of the device's memory, together."""
        return sum(self.memory.values())


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a step costs each device. Bytes and seconds.

    Attributes:
      plan: whose step it is.
      rates: of the devices.
      parameters: how many the model has.
      tokens: of all devices in a step; 0 where the batch has none.
      programs: in the order they run.
      host_bytes, disk_bytes: of host memory and disk, for each device.
      whole: every program was compiled; those after one that does not fit may be left out.
    """

    plan: Plan = dataclasses.field(repr=False)
    rates: Rates
    parameters: int
    tokens: int
    programs: tuple[ProgramCost, ...]
    host_bytes: int
    disk_bytes: int
    whole: bool = True

    @property
    def devices(self) -> int:
        return self.plan.mesh.devices.size

    @property
    def peak(self) -> ProgramCost:
        """The program that takes the most device memory."""
        return max(self.programs, key=lambda program: program.bytes)

    @property
    def headroom(self) -> int:
        """Bytes left at the peak; below 0 where the step does not fit."""
        return self.rates.room - self.peak.bytes

    @property
    def fits(self) -> bool:
        return self.headroom >= 0 and all(each.made for each in self.programs)

    @property
    def seconds(self) -> float:
        """Of a step. What lies on disk is read and written once a step, beside the rest."""
        beside = min(self.devices, GPUS_PER_HOST)
        disk = 2 * self.disk_bytes * beside / self.rates.disk
        return max(sum(each.times * each.seconds for each in self.programs), disk)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: 3 times the forward pass's matrix products, without what is
        computed again, over the step's time at the highest matrix rate (PaLM, appendix B)."""
        model = 3 * sum(each.times * each.forward for each in self.programs)
        return model / (self.seconds * max(self.rates.matrix.values()))

    @property
    def compile_seconds(self) -> float:
        return sum(each.compile_seconds for each in self.programs)

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Of all programs together, by kind."""
        kinds: dict[str, list[Traffic]] = collections.defaultdict(list)
        for program in self.programs:
            for each in program.traffic:
                kinds[each.kind].append(each.repeated(program.times))
        return tuple(map(sum_traffic, kinds.values()))


def sum_traffic(parts: Sequence[Traffic]) -> Traffic:
    """Several of one kind as one."""
    sizes = collections.Counter[str]()
    for part in parts:
        for dtype in part.dtypes:
            sizes[dtype] += part.bytes
    return Traffic(
        kind=parts[0].kind,
        dtypes=tuple(dtype for dtype, _ in sizes.most_common()),
        times=sum(part.times for part in parts),
        bytes=sum(part.bytes for part in parts),
        seconds=sum(part.seconds for part in parts),
        waited=sum(part.waited for part in parts),
    )
