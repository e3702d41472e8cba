"""Cost measurements of a step on its compiled programs.

    found = forecast(step.programs(state, batch), zero.plan(state), rates("h100"), tokens=8192)
    print(found.peak.memory, found.seconds)

The programs are compiled for the devices of the plan's mesh, which need not exist.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from zerojax.devices.network import nodes_of
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
from zerojax.foresight.forecast import (
    Again,
    Compile,
    CompiledProgram,
    Forecast,
    ProgramCost,
    Traffic,
    sum_traffic,
)
from zerojax.hlo.assignment import HeldBuffer, compile_with_buffers
from zerojax.hlo.links import sent_by
from zerojax.hlo.program import HloProgram, parse
from zerojax.hlo.rematerialised import computed_again
from zerojax.hlo.timeline import Place, ProgramTime, program_time
from zerojax.hlo.traffic import Collective, collectives
from zerojax.hlo.transfers import HostCopy, host_copies
from zerojax.plan.places import DEVICE, DISK, HOST
from zerojax.plan.state_sharding import Plan
from zerojax.xla import compat
from zerojax.xla.compiler import (
    COMMAND_BUFFERS,
    SLOP,
    SLOP_FACTOR,
    rematerializes,
    saving_memory,
)
from zerojax.xla.lowered import GRADIENTS as FIRST
from zerojax.xla.lowered import READ, STEP, WRITTEN, LoweredProgram

INWARD, OUTWARD = "to the device", "to the host"
"""Kinds of traffic: copies between device and host memory."""
# XLA for TPUs refuses to compile a program that does not fit; XLA for GPUs compiles the program.
_WANTED = re.compile(r"(?:Used |temporaries \()(\d+(?:\.\d+)?)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(CompiledProgram):
    """Measurements of one compiled program.

    Attributes:
      result: Results on the device, except results that reuse an argument's buffer.
      between: Arguments of an update that stay on the device between programs.
      host_result: Results in host memory.
      host_temporary: Host memory besides arguments and results.
    """

    result: int = 0
    between: int = 0
    host_result: int = 0
    host_temporary: int = 0


def measure(
    lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates, nodes: tuple[int, ...]
) -> Measurement:
    """Compiles and measures a program; if XLA refuses the program, uses the size in XLA's message.

    Args:
      lowered: The program.
      known: The shapes of the parameters.
      rates: The speeds of the devices.
      nodes: The node of each device, from :func:`zerojax.devices.network.nodes_of`.
    """
    return measure_compiled(lowered, known, rates, nodes)[0]


def measure_compiled(
    lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates, nodes: tuple[int, ...]
) -> tuple[Measurement, jax.stages.Compiled | None]:
    """Returns :func:`measure`'s result and the executable; None if XLA refused the program."""
    measured, executable, held = _compiled(lowered, rates.room, buffers=True)
    if executable is None:
        return measured, None
    text = executable.as_text() or ""
    program, sent, copied = parse(text), collectives(text), host_copies(text)
    memory: Any = executable.memory_analysis()
    graphs = compat.compiler_options(lowered).get(COMMAND_BUFFERS) != ""
    # Those of a loop over ticks; outside of it stages exchange layers.
    permuted = (
        shape
        for each in sent
        if each.op_name.endswith("/ppermute") and "/while/body/" in each.op_name
        for shape in each.shapes
    )
    spent = program_time(program, sent, copied, rates, nodes, records_graphs=graphs)
    measured = dataclasses.replace(
        measured,
        memory=attribute(text, held, memory.temp_size_in_bytes, known),
        between=lying_between(program),
        seconds=spent.seconds,
        forward=spent.forward,
        traffic=sum_traffic((each, 1) for each in _traffic(sent, copied, spent, nodes)),
        boundary=max((shape.bytes for shape in permuted), default=0),
        again=Again(computed_again(program), spent.bytes_again, spent.again),
    )
    return measured, executable


def _compiled(
    lowered: jax.stages.Lowered, room: int, *, buffers: bool
) -> tuple[Measurement, jax.stages.Compiled | None, tuple[HeldBuffer, ...]]:
    """Compiles a program; also with the options that save memory if it does not fit. Returns what
    is known before its text is read; the executable that fits, None if XLA refused the program for
    its memory; and, if asked for, its buffers at the peak."""

    def compile_with(
        changed: dict[str, str | bool] | None,
    ) -> tuple[jax.stages.Compiled, tuple[HeldBuffer, ...]]:
        if buffers:
            return compile_with_buffers(lowered, changed or {})
        return lowered.compile(compiler_options=changed), ()

    begun, saving = time.perf_counter(), False
    try:
        executable, held = compile_with(None)
        options = compat.compiler_options(lowered)
        changed = saving_memory(options)
        if changed and _needed(executable) > room:
            again = compile_with(changed)
            if saving := _needed(again[0]) <= room:
                (executable, held), options = again, {**options, **changed}
    except jax.errors.JaxRuntimeError as error:
        if (wanted := wanted_bytes(str(error))) is None:
            raise
        refused = Compile(time.perf_counter() - begun, refused=True)
        return Measurement(memory={OTHER: wanted}, compile=refused), None, ()
    seconds = time.perf_counter() - begun
    memory: Any = executable.memory_analysis()
    measured = Measurement(
        memory={},
        arguments=memory.argument_size_in_bytes,
        result=max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        host_result=memory.host_output_size_in_bytes,
        host_temporary=memory.host_temp_size_in_bytes,
        compile=Compile(
            seconds,
            saving=saving,
            rematerializes=rematerializes(options),
            slop=int(options.get(SLOP_FACTOR, SLOP)),
        ),
    )
    return measured, executable, held


def _needed(executable: jax.stages.Compiled) -> int:
    memory: Any = executable.memory_analysis()
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)


def measure_memory(
    lowered: jax.stages.Lowered,
    known: ParameterShapes,
    rates: Rates,
    nodes: tuple[int, ...],
    *,
    several: bool = True,
) -> Measurement:
    """Measures only the memory of a program, compiled as for the run: jax does not compile again.

    Args:
      lowered: The program.
      rates: The memory of the devices.
      known, nodes: Unused, for the signature of :data:`Measure`.
      several: Whether to read arguments by kind from the program's text, which a step of several
        programs needs; otherwise all memory is "other".
    """

    measured, executable, _ = _compiled(lowered, rates.room, buffers=False)
    if executable is None:
        return measured
    memory: Any = executable.memory_analysis()
    kinds, between = collections.Counter({OTHER: memory.argument_size_in_bytes}), 0
    if several:
        program = parse(executable.as_text() or "")
        kinds, between = arguments(program), lying_between(program)
    kinds[OTHER] += memory.temp_size_in_bytes
    return dataclasses.replace(measured, memory=dict(kinds), between=between)


def wanted_bytes(message: str) -> int | None:
    """Parses XLA's message for the least bytes that a refused program needs.

    Returns:
      The bytes, 0 if the message lacks them, or None if the message is not about memory.

    Example:
      >>> wanted_bytes(
      ...     "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
      ...     "temporaries (2.00G) exceeds available HBM (1.75G)."
      ... )
      2147483648
    """
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    wanted = _WANTED.search(message)
    return round(float(wanted[1]) * _UNITS[wanted[2]]) if wanted else 0


Measure = Callable[[jax.stages.Lowered, ParameterShapes, Rates, tuple[int, ...]], Measurement]


def forecast(
    programs: Iterable[LoweredProgram],
    plan: Plan,
    rates: Rates,
    tokens: int = 0,
    note: Callable[[str], None] = lambda name: None,
    enough: Callable[[ProgramCost], bool] = lambda cost: False,
    measured: Measure = measure,
) -> Forecast:
    """Compiles the programs of a step and returns the forecast.

    Args:
      programs: The programs, from ``train_step.programs(state, batch)``.
      plan: The plan of the same state.
      rates: The speeds of the devices, from :func:`zerojax.devices.rates.rates`.
      tokens: Tokens in a step, over all devices.
      note: Called with the name of each program before its compile.
      enough: Called with the cost of each program; True skips the programs after it.
      measured: Measures a program: :func:`measure`, or a cached version.

    Raises:
      ImportError: The compiler's wheels are not installed.
    """
    known, nodes = ParameterShapes.of(plan), nodes_of(plan.mesh)
    costs: list[ProgramCost] = []
    first, is_partial = None, False
    for name, lowered, times in programs:
        note(name)
        measurement = measured(lowered, known, rates, nodes)
        kinds = collections.Counter(measurement.memory)
        kinds[GRADIENTS if name == FIRST else OTHER] += measurement.result
        if measurement.compile.refused:
            kinds[OTHER] = max(kinds[OTHER], rates.memory)
        elif name == FIRST:
            first = measurement
            # Adds the state on the device that is not an argument; copies and batch are not state.
            given = measurement.arguments - _copies(plan, DEVICE) - measurement.memory.get(BATCH, 0)
            kinds[STATE] += max(plan.bytes_in(DEVICE) - given, 0)
        elif first is not None:  # an update; other state, copies and gradients stay on the device
            kinds[STATE] += kinds.pop(OTHER, 0)
            on_device = plan.bytes_in(DEVICE) + _copies(plan, DEVICE) + first.result
            kinds[GRADIENTS] += (
                gradient_bytes := min(max(on_device - measurement.between, 0), first.result)
            )
            kinds[PARAMETERS] += max(on_device - measurement.between, 0) - gradient_bytes
        shared = {x.name: getattr(measurement, x.name) for x in dataclasses.fields(CompiledProgram)}
        shared["memory"] = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
        host = measurement.host_temporary
        costs.append(ProgramCost(name=name, host=host, times=times, **shared))
        if is_partial := measurement.compile.refused or (name != STEP and enough(costs[-1])):
            break
    host = max(each.host for each in costs)
    if first is not None:
        host += _copies(plan, HOST) + first.host_result
    return Forecast(
        plan=plan,
        rates=rates,
        parameters=sum(math.prod(leaf.shape) for leaf in plan.leaves["params"]),
        tokens=tokens,
        programs=tuple(costs),
        host_bytes=plan.bytes_in(HOST) + host,
        disk_bytes=plan.bytes_in(DISK),
        is_complete=not is_partial,
    )


def lying_between(program: HloProgram) -> int:
    """Returns the bytes of an update's arguments on the device that are not offloaded state.

    These are gradients and compute parameters; slices of the offloaded state are named ``loaded``.
    """
    return sum(
        each.bytes
        for each in program.entry.instructions
        if each.opcode == "parameter" and each.op_name.startswith((WRITTEN, READ))
        if not each.in_host
    )


def _copies(plan: Plan, place: str) -> int:
    """Returns the bytes of the compute parameters that a place stores in addition to the state."""
    return sum(leaf.bytes_per_device for leaf in plan.copies() if leaf.place == place)


def _traffic(
    sent: Sequence[Collective],
    copied: Sequence[HostCopy],
    spent: ProgramTime,
    nodes: tuple[int, ...],
) -> Iterator[Traffic]:
    """Yields the traffic of each collective of a program, then that of each copy."""
    # A computation with two callers lists its collectives twice, but its time only once.
    under_way, waited = dict(spent.under_way), dict(spent.waited)

    def time_of(key: Place) -> tuple[float, float]:
        return under_way.pop(key, 0.0), waited.pop(key, 0.0)

    for each in sent:
        between = round(each.times * sent_by(each, nodes).between)
        spent_on = time_of(Place(each.computation, each.name))
        yield Traffic(each.kind, each.dtypes, each.times, each.moved_bytes, between, *spent_on)
    for copy in copied:
        kind, moved = INWARD if copy.inward else OUTWARD, copy.times * copy.bytes
        spent_on = time_of(Place(copy.computation, copy.name))
        yield Traffic(kind, (), copy.times, moved, 0, *spent_on)
