"""The predicted run time of a compiled program, by a roofline model over its schedule.

Instructions run one after another in scheduled order. A matrix product or a fusion takes the longer
of the times for its arithmetic at the matrix rate and for its bytes at the memory rate. Collectives
with a start and a done overlap with computation, one after another; the program waits at the done.
Copies between device and host overlap with nothing where XLA records CUDA graphs, and copies by
kernels are assumed to overlap with nothing either; without graphs, a copy by the copy engines runs
beside computation and beside copies in the other direction, as an H200 ran them
(benchmarks/records/2026-11-27-gpu_day.md). A loop takes its body's time multiplied
by its trip count, a conditional the time of its slowest branch.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerojax.devices.rates import Rates
from zerojax.hlo.links import sent_by
from zerojax.hlo.program import Computation, HloProgram, Instruction
from zerojax.hlo.rematerialised import is_again
from zerojax.hlo.traffic import Collective
from zerojax.hlo.transfers import HostCopy
from zerojax.hlo.work import FREE, work_of


class Place(NamedTuple):
    """The location of an instruction: the name of its computation, and its name."""

    computation: str
    name: str


_seconds = functools.partial(collections.defaultdict[Place, float], float)


class Transfer(NamedTuple):
    """A collective, or a copy between device and host.

    Attributes:
      seconds: Its duration.
      link: The link that it occupies while the device computes; None if the device waits for it.
    """

    seconds: float
    link: str | None


@dataclasses.dataclass
class ProgramTime:
    """The predicted time of a program or of a part of it.

    Attributes:
      seconds: Seconds from the first instruction to the last.
      forward: Floating-point operations of the forward pass's matrix products.
      again: The part of ``seconds`` in which XLA computes values again to save memory.
      bytes_again: Bytes of these values.
      waited: Seconds waited for each transfer, a collective or a copy.
      under_way: Total seconds of each transfer, hidden or not.
    """

    seconds: float = 0.0
    forward: float = 0.0
    again: float = 0.0
    bytes_again: int = 0
    waited: dict[Place, float] = dataclasses.field(default_factory=_seconds)
    under_way: dict[Place, float] = dataclasses.field(default_factory=_seconds)

    def add(self, other: ProgramTime, times: int = 1) -> None:
        """Adds another part, which runs ``times`` times."""
        self.seconds += times * other.seconds
        self.forward += times * other.forward
        self.again += times * other.again
        self.bytes_again += times * other.bytes_again
        for key in other.under_way:
            self.waited[key] += times * other.waited[key]
            self.under_way[key] += times * other.under_way[key]


def program_time(
    program: HloProgram,
    sent: Sequence[Collective],
    copied: Sequence[HostCopy],
    rates: Rates,
    nodes: tuple[int, ...],
    *,
    records_graphs: bool = True,
) -> ProgramTime:
    """Predicts the time of a program.

    Args:
      program: The parsed program.
      sent: The program's collectives.
      copied: The program's copies between device and host.
      rates: The speeds of the devices.
      nodes: The node of each device, from :func:`zerojax.devices.network.nodes_of`.
      records_graphs: Whether XLA records CUDA graphs; copies to and from the host then hide
        behind nothing.
    """
    transfers: dict[Place, Transfer] = {}
    for each in sent:
        seconds = rates.collective_seconds(sent_by(each, nodes), each.kind)
        transfers[Place(each.computation, each.name)] = Transfer(seconds, "collectives")
    for copy in copied:
        seconds = rates.host_seconds(copy.bytes)
        start = program.computations[copy.computation][copy.name]
        is_beside = start.opcode == "copy-start" and not records_graphs
        link = ("to the device" if copy.inward else "to the host") if is_beside else None
        transfers[Place(copy.computation, copy.name)] = Transfer(seconds, link)
    return Timeline(program, transfers, rates).time(program.entry)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The schedule of a program on devices of some speed.

    Attributes:
      program: The program.
      transfers: Its collectives and copies.
      rates: The speeds of the devices.
    """

    program: HloProgram
    transfers: Mapping[Place, Transfer]
    rates: Rates

    def time(self, computation: Computation) -> ProgramTime:
        """Predicts the time of one run of a computation."""
        spent = ProgramTime()
        free_at: dict[str, float] = {}  # link -> the time at which it is free again
        ends_at: dict[str, float] = {}  # name of a transfer -> the time at which it ends
        for each in computation.instructions:
            key = Place(computation.name, each.name)
            if key in self.transfers:
                seconds, link = self.transfers[key]
                begins_at = max(spent.seconds, free_at.get(link, 0.0)) if link else spent.seconds
                ends_at[each.name] = begins_at + seconds
                if link:
                    free_at[link] = ends_at[each.name]
                spent.under_way[key] += seconds
                if not link or not each.opcode.endswith("-start"):
                    _wait(spent, key, ends_at[each.name])
            elif each.opcode.endswith(("-done", "-update")):
                started = _start(computation, each)
                if started in ends_at:
                    _wait(spent, Place(computation.name, started), ends_at[started])
            elif each.opcode == "while":
                for body in self.program.callees(each):
                    spent.add(self.time(body), self.program.trips(each) or 1)
            elif each.opcode in ("call", "conditional"):
                parts = map(self.time, self.program.callees(each))
                spent.add(max(parts, key=lambda part: part.seconds, default=ProgramTime()))
            elif each.opcode not in FREE:
                self._compute(computation, each, spent)
        for started, end in ends_at.items():
            _wait(spent, Place(computation.name, started), end)
        return spent

    def _compute(self, computation: Computation, each: Instruction, spent: ProgramTime) -> None:
        """Adds an instruction that computes."""
        work = work_of(self.program, computation, each)
        seconds = work.seconds(self.rates)
        spent.seconds += seconds
        if not is_again(each):
            spent.forward += work.forward
        else:
            spent.again += seconds
            spent.bytes_again += each.bytes
        # XLA for TPUs places a collective inside the fusion that hides it.
        for fused in self.program.callees(each):
            for key in (Place(fused.name, each.name) for each in fused.instructions):
                if key in self.transfers:
                    under_way = self.transfers[key].seconds
                    spent.under_way[key] += under_way
                    _wait(spent, key, spent.seconds - seconds + under_way)


def _wait(spent: ProgramTime, key: Place, until: float) -> None:
    wait = max(0.0, until - spent.seconds)
    spent.seconds += wait
    spent.waited[key] += wait


def _start(computation: Computation, each: Instruction) -> str:
    """Returns the name of the instruction that started the operation that ``each`` ends."""
    while each.opcode.endswith(("-done", "-update")):
        each = computation[each.operands[0]]
    return each.name
