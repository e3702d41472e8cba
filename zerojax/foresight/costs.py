"""Compile the programs of a step and measure what each takes.

    found = forecast(step.programs(state, batch), zero.plan(state), rates("h100"), tokens=8192)
    print(found.peak.memory, found.seconds)

They are compiled for the devices of the plan's mesh, which need not be there.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from zerojax.foresight.assignment import compile_and_look
from zerojax.foresight.attribution import GRADIENTS, OTHER, PARAMETERS, STATE, Known, attribute
from zerojax.foresight.copies import host_copies, in_host
from zerojax.foresight.forecast import Cost, Forecast, Traffic, together
from zerojax.foresight.hlo import Program, parse
from zerojax.foresight.rates import Rates
from zerojax.foresight.timeline import INWARD, OUTWARD, Spent, spend
from zerojax.foresight.traffic import collectives
from zerojax.offload.places import DISK, HOST
from zerojax.plan import Plan

STEP, FIRST = "step", "gradients"
"""What a step's only program is called, and the first of several."""


def forecast(
    programs: Iterable[tuple[str, jax.stages.Lowered]],
    plan: Plan,
    rates: Rates,
    tokens: int = 0,
    note: Callable[[str], None] = lambda name: None,
    enough: Callable[[Cost], bool] = lambda cost: False,
) -> Forecast:
    """Compile the programs of a step and measure them.

    Args:
      programs: as ``train_step.programs(state, batch)`` yields them.
      plan: of the same state.
      rates: of the devices, :func:`zerojax.foresight.rates.rates`.
      tokens: of all devices in a step.
      note: told the name of each program before it is compiled.
      enough: told of each program; where it is True the others are left out.

    Raises:
      ImportError: the compiler's wheels are not installed.
    """
    known = Known.of(plan)
    found: list[Cost] = []
    resting: collections.Counter[str] = collections.Counter()
    host = 0
    for name, lowered in programs:
        note(name)
        begun = time.perf_counter()
        executable, held = compile_and_look(lowered)
        seconds = time.perf_counter() - begun
        memory: Any = executable.memory_analysis()
        text = executable.as_text()
        program = parse(text)
        kinds = collections.Counter(attribute(text, held, memory.temp_size_in_bytes, known))
        result = memory.output_size_in_bytes - memory.alias_size_in_bytes
        kinds[GRADIENTS if name == FIRST else OTHER] += max(result, 0)
        if name == FIRST:
            resting = collections.Counter(
                {PARAMETERS: memory.argument_size_in_bytes, GRADIENTS: max(result, 0)}
            )
            host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
        elif name != STEP:
            kinds[STATE] += kinds.pop(OTHER, 0)
            kinds += resting - _arguments(program, in_host(text))
        spent = spend(program, collectives(text), host_copies(text), rates)
        found.append(
            Cost(
                name=name,
                memory=dict(kinds),
                host=memory.host_temp_size_in_bytes,
                seconds=spent.seconds,
                computing=spent.computing,
                flops=spent.flops,
                forward=spent.forward,
                traffic=tuple(_traffic(text, spent)),
                compile_seconds=seconds,
            )
        )
        if enough(found[-1]):
            break
    return Forecast(
        plan=plan,
        rates=rates,
        parameters=sum(math.prod(leaf.shape) for leaf in plan.leaves["params"]),
        tokens=tokens,
        programs=tuple(found),
        host_bytes=plan.bytes_in(HOST) + host + max(each.host for each in found),
        disk_bytes=plan.bytes_in(DISK),
    )


def _arguments(program: Program, hosted: frozenset[str]) -> collections.Counter[str]:
    """Bytes of an update's arguments that lie on the device between programs: all but the pieces
    of the state."""
    found = collections.Counter[str]()
    kinds = {"written[": PARAMETERS, "read[": GRADIENTS}
    for each in program.entry.instructions:
        if each.opcode == "parameter" and each.name not in hosted:
            for prefix, kind in kinds.items():
                if each.op_name.startswith(prefix):
                    found[kind] += sum(shape.bytes for shape in each.shapes)
    return found


def _traffic(text: str, spent: Spent) -> Iterator[Traffic]:
    """Collectives by kind, then copies by direction."""
    parts: dict[str, list[Traffic]] = collections.defaultdict(list)
    seen = set[tuple[str, str]]()
    for each in collectives(text):
        key = each.computation, each.name
        # A computation called from several places has its times summed already.
        again, _ = key in seen, seen.add(key)
        under, waited = (0.0 if again else of.get(key, 0.0) for of in (spent.under_way, spent.waited))
        parts[each.kind].append(
            Traffic(each.kind, each.dtypes, each.times, each.moved_bytes, under, waited)
        )
    for copy in host_copies(text):
        key = copy.computation, copy.name
        again, _ = key in seen, seen.add(key)
        under, waited = (0.0 if again else of.get(key, 0.0) for of in (spent.under_way, spent.waited))
        kind = INWARD if copy.inward else OUTWARD
        parts[kind].append(Traffic(kind, (), copy.times, copy.times * copy.bytes, under, waited))
    for same in parts.values():
        yield together(same)
