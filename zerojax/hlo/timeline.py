"""How long a compiled program takes, by a roofline model over its schedule.

Instructions run one after another as they stand. A matrix product or a fusion takes the longer of
its arithmetic at the matrix rate and its bytes at the memory rate. Collectives that have a start
and a done run beside, one after another, as do copies in each direction between device and host;
what is not over at its done is waited for. A loop takes its body's time as often as it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from zerojax.devices.rates import Rates
from zerojax.hlo.program import Computation, HloProgram, Instruction
from zerojax.hlo.traffic import Collective
from zerojax.hlo.transfers import HostCopy
from zerojax.hlo.work import FREE, work_of

COLLECTIVES, INWARD, OUTWARD = "collectives", "to the device", "to the host"


@dataclasses.dataclass
class ProgramTime:
    """What a program, or a part of it, takes.

    Attributes:
      seconds: from the first instruction to the last.
      computing: of them, in kernels.
      flops: of matrix products, ``forward`` those of the forward pass.
      waited: seconds waited for each collective and copy, by (computation, name).
      under_way: seconds for which each was under way, waited for or not.
    """

    seconds: float = 0.0
    computing: float = 0.0
    flops: float = 0.0
    forward: float = 0.0
    waited: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    under_way: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    def add(self, other: ProgramTime, times: int = 1) -> None:
        """Takes in another part that runs so often, after what is there."""
        self.seconds += times * other.seconds
        self.computing += times * other.computing
        self.flops += times * other.flops
        self.forward += times * other.forward
        for mine, theirs in ((self.waited, other.waited), (self.under_way, other.under_way)):
            for key, seconds in theirs.items():
                mine[key] = mine.get(key, 0.0) + times * seconds


def program_time(
    program: HloProgram,
    sent: Sequence[Collective],
    copied: Sequence[HostCopy],
    rates: Rates,
) -> ProgramTime:
    """The time of a program, from its parsed text.

    Args:
      program: parsed.
      sent, copied: its collectives and its copies between device and host.
      rates: of the devices.
    """
    ways: dict[tuple[str, str], tuple[str, float]] = {}
    for each in sent:
        moved = each.moved_bytes / max(each.times, 1)
        seconds = rates.collective_seconds(moved, each.group_size)
        ways[each.computation, each.name] = COLLECTIVES, seconds
    for copy in copied:
        way = INWARD if copy.inward else OUTWARD
        ways[copy.computation, copy.name] = way, rates.host_seconds(copy.bytes)
    return _run(program, program.entry, ways, rates)


def _run(
    program: HloProgram,
    place: Computation,
    ways: Mapping[tuple[str, str], tuple[str, float]],
    rates: Rates,
) -> ProgramTime:
    spent = ProgramTime()
    free: dict[str, float] = {}  # from when on each way is free
    over: dict[str, float] = {}  # when what was started is over
    for each in place.instructions:
        key = place.name, each.name
        if key in ways:
            way, seconds = ways[key]
            over[each.name] = free[way] = max(spent.seconds, free.get(way, 0.0)) + seconds
            spent.under_way[key] = spent.under_way.get(key, 0.0) + seconds
            if not each.opcode.endswith("-start"):
                _wait(spent, key, over[each.name])
        elif each.opcode.endswith(("-done", "-update")):
            started = _start(place, each)
            if started in over:
                _wait(spent, (place.name, started), over[started])
        elif each.opcode == "while":
            for body in program.callees(each):
                spent.add(_run(program, body, ways, rates), program.trips(each) or 1)
        elif each.opcode in ("call", "conditional"):
            inner = [_run(program, callee, ways, rates) for callee in program.callees(each)]
            if inner:
                spent.add(max(inner, key=lambda part: part.seconds))
        elif each.opcode not in FREE:
            _compute(program, place, each, ways, rates, spent)
    for started, end in over.items():
        _wait(spent, (place.name, started), end)
    return spent


def _compute(
    program: HloProgram,
    place: Computation,
    each: Instruction,
    ways: Mapping[tuple[str, str], tuple[str, float]],
    rates: Rates,
    spent: ProgramTime,
) -> None:
    work = work_of(program, place, each)
    seconds = rates.compute_seconds(work.flops, work.bytes)
    spent.seconds += seconds
    spent.computing += seconds
    spent.flops += sum(work.flops.values())
    spent.forward += work.forward
    # TPUs' compiler puts a collective into the fusion that hides it.
    for inside in program.callees(each):
        for key in ((inside.name, instruction.name) for instruction in inside.instructions):
            if key in ways:
                under_way = ways[key][1]
                spent.under_way[key] = spent.under_way.get(key, 0.0) + under_way
                _wait(spent, key, spent.seconds - seconds + under_way)


def _wait(spent: ProgramTime, key: tuple[str, str], until: float) -> None:
    wait = max(0.0, until - spent.seconds)
    spent.seconds += wait
    spent.waited[key] = spent.waited.get(key, 0.0) + wait


def _start(place: Computation, each: Instruction) -> str:
    """The instruction that began what this one ends."""
    while each.opcode.endswith(("-done", "-update")):
        each = place[each.operands[0]]
    return each.name
