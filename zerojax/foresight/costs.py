"""Compile the programs of a step and measure what each takes.

    found = forecast(step.programs(state, batch), zero.plan(state), rates("h100"), tokens=8192)
    print(found.peak.memory, found.seconds)

They are compiled for the devices of the plan's mesh, which need not be there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from zerojax.devices.rates import Rates
from zerojax.foresight.attribution import (
    BATCH,
    GRADIENTS,
    KINDS,
    OTHER,
    PARAMETERS,
    STATE,
    ParameterShapes,
    arguments,
    attribute,
)
from zerojax.foresight.forecast import Forecast, ProgramCost, Traffic, sum_traffic
from zerojax.foresight.refused import refused
from zerojax.hlo.assignment import compile_with_buffers
from zerojax.hlo.program import HloProgram, parse
from zerojax.hlo.timeline import INWARD, OUTWARD, Place, ProgramTime, program_time
from zerojax.hlo.traffic import Collective, collectives
from zerojax.hlo.transfers import HostCopy, host_copies, in_host
from zerojax.plan.places import DEVICE, DISK, HOST
from zerojax.plan.plan import Plan
from zerojax.xla.lowered import GRADIENTS as FIRST
from zerojax.xla.lowered import READ, STEP, WRITTEN, LoweredProgram


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one compiled program shows by itself. Bytes and seconds.

    Attributes:
      memory: of the device by kind, arguments and temporaries.
      arguments, result: on the device; results that take an argument's place are not counted.
      between: of an update's arguments, those that lie on the device between programs.
      host_result: results in host memory; ``host_temporary`` beside arguments and results.
      seconds, computing, flops, forward, traffic, compile_seconds: as in
        :class:`ProgramCost`.
      made: False where XLA refused the program for its memory, of which ``memory`` is the least.
    """

    memory: dict[str, int]
    arguments: int = 0
    result: int = 0
    between: int = 0
    host_result: int = 0
    host_temporary: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    flops: float = 0.0
    forward: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    compile_seconds: float = 0.0
    made: bool = True


def measure(lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates) -> Measurement:
    """Compile a program and measure it; of one that XLA refuses for its memory, what it says."""
    begun = time.perf_counter()
    try:
        executable, held = compile_with_buffers(lowered)
    except jax.errors.JaxRuntimeError as error:
        return _not_made(error, begun)
    seconds = time.perf_counter() - begun
    text = executable.as_text() or ""
    program, sent, copied = parse(text), collectives(text), host_copies(text)
    memory: Any = executable.memory_analysis()
    kinds = attribute(text, held, memory.temp_size_in_bytes, known)
    spent = program_time(program, sent, copied, rates)
    traffic = tuple(_traffic(sent, copied, spent))
    return _measured(memory, kinds, lying_between(program, in_host(text)), spent, traffic, seconds)


def measure_memory(
    lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates, *, several: bool = True
) -> Measurement:
    """Compile a program as it will be run, which jax then does not compile again, and look at its
    memory alone.

    Args:
      lowered, known, rates: as for :func:`measure`; the last two are not looked at.
      several: it is one of a step's several programs. That of a step of one needs no reading.
    """
    begun = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return _not_made(error, begun)
    seconds = time.perf_counter() - begun
    memory: Any = executable.memory_analysis()
    kinds, between = collections.Counter({OTHER: memory.argument_size_in_bytes}), 0
    if several:
        program, hosted = parse(text := executable.as_text() or ""), in_host(text)
        kinds, between = arguments(program, hosted), lying_between(program, hosted)
    kinds[OTHER] += memory.temp_size_in_bytes
    return _measured(memory, dict(kinds), between, ProgramTime(), (), seconds)


def _not_made(error: jax.errors.JaxRuntimeError, begun: float) -> Measurement:
    """A program that XLA refuses for its memory; raises another error again."""
    if (wanted := refused(str(error))) is None:
        raise error
    seconds = time.perf_counter() - begun
    return Measurement(memory={OTHER: wanted}, compile_seconds=seconds, made=False)


def _measured(
    memory: Any,
    kinds: dict[str, int],
    between: int,
    spent: ProgramTime,
    traffic: tuple[Traffic, ...],
    compile_seconds: float,
) -> Measurement:
    """``memory`` is XLA's ``memory_analysis``."""
    return Measurement(
        memory=kinds,
        arguments=memory.argument_size_in_bytes,
        result=max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        between=between,
        host_result=memory.host_output_size_in_bytes,
        host_temporary=memory.host_temp_size_in_bytes,
        seconds=spent.seconds,
        computing=spent.computing,
        flops=spent.flops,
        forward=spent.forward,
        traffic=traffic,
        compile_seconds=compile_seconds,
    )


Measure = Callable[[jax.stages.Lowered, ParameterShapes, Rates], Measurement]


def forecast(
    programs: Iterable[LoweredProgram],
    plan: Plan,
    rates: Rates,
    tokens: int = 0,
    note: Callable[[str], None] = lambda name: None,
    enough: Callable[[ProgramCost], bool] = lambda cost: False,
    measured: Measure = measure,
) -> Forecast:
    """Compile the programs of a step and put together what they take.

    Args:
      programs: as ``train_step.programs(state, batch)`` yields them.
      plan: of the same state.
      rates: of the devices, :func:`zerojax.devices.rates.rates`.
      tokens: of all devices in a step.
      note: told the name of each program before it is compiled.
      enough: told of each program; where it is True the others are left out.
      measured: what measures a program; one that remembers, perhaps.

    Raises:
      ImportError: the compiler's wheels are not installed.
    """
    known = ParameterShapes.of(plan)
    found: list[ProgramCost] = []
    first, left_out = None, False
    for name, lowered, times in programs:
        note(name)
        one = measured(lowered, known, rates)
        kinds = collections.Counter(one.memory)
        kinds[GRADIENTS if name == FIRST else OTHER] += one.result
        if not one.made:
            kinds[OTHER] = max(kinds[OTHER], rates.memory)
        elif name == FIRST:
            first = one
            # What else of the state is on the device: the copies and the batch are none of it.
            given = one.arguments - _copies(plan, DEVICE) - one.memory.get(BATCH, 0)
            kinds[STATE] += max(plan.bytes_in(DEVICE) - given, 0)
        elif first is not None:  # an update; state, copies and gradients lie there meanwhile
            kinds[STATE] += kinds.pop(OTHER, 0)
            lying = plan.bytes_in(DEVICE) + _copies(plan, DEVICE) + first.result
            kinds[GRADIENTS] += (rest := min(max(lying - one.between, 0), first.result))
            kinds[PARAMETERS] += max(lying - one.between, 0) - rest
        found.append(
            ProgramCost(
                name=name,
                memory={kind: kinds[kind] for kind in KINDS if kinds[kind]},
                host=one.host_temporary,
                seconds=one.seconds,
                computing=one.computing,
                flops=one.flops,
                forward=one.forward,
                traffic=one.traffic,
                times=times,
                compile_seconds=one.compile_seconds,
                made=one.made,
            )
        )
        if left_out := not one.made or (name != STEP and enough(found[-1])):
            break
    host = max(each.host for each in found)
    if first is not None:
        host += _copies(plan, HOST) + first.host_result
    return Forecast(
        plan=plan,
        rates=rates,
        parameters=sum(math.prod(leaf.shape) for leaf in plan.leaves["params"]),
        tokens=tokens,
        programs=tuple(found),
        host_bytes=plan.bytes_in(HOST) + host,
        disk_bytes=plan.bytes_in(DISK),
        whole=not left_out,
    )


def lying_between(program: HloProgram, hosted: frozenset[str]) -> int:
    """Bytes of an update's arguments on the device that are not pieces of the state: gradients and
    compute parameters, all that it reads or replaces there. Its pieces come as ``loaded``."""
    return sum(
        shape.bytes
        for each in program.entry.instructions
        if each.opcode == "parameter" and each.op_name.startswith((WRITTEN, READ))
        if each.name not in hosted
        for shape in each.shapes
    )


def _copies(plan: Plan, place: str) -> int:
    """Bytes of the parameters that lie there beside the state, to compute with."""
    return sum(leaf.bytes_per_device for leaf in plan.copies() if leaf.place == place)


def _traffic(
    sent: Sequence[Collective], copied: Sequence[HostCopy], spent: ProgramTime
) -> Iterator[Traffic]:
    """Collectives by kind, then copies by direction."""
    parts: dict[str, list[Traffic]] = collections.defaultdict(list)
    # What stands in a computation that is called from two places comes twice, its time once.
    under_way, waited = dict(spent.under_way), dict(spent.waited)

    def add(kind: str, dtypes: tuple[str, ...], times: int, moved: int, key: Place) -> None:
        seconds, wait = under_way.pop(key, 0.0), waited.pop(key, 0.0)
        parts[kind].append(Traffic(kind, dtypes, times, moved, seconds, wait))

    for each in sent:
        key = Place(each.computation, each.name)
        add(each.kind, each.dtypes, each.times, each.moved_bytes, key)
    for copy in copied:
        kind = INWARD if copy.inward else OUTWARD
        add(kind, (), copy.times, copy.times * copy.bytes, Place(copy.computation, copy.name))
    for same in parts.values():
        yield sum_traffic(same)
