"""A training step compiled for absent GPUs, and what a device holds and sends.

    cost = compile_program(program, stage=3, devices=8)
    cost.units, cost.argument_bytes

``extra_state.py`` and ``held_or_moved.py`` print these costs, and the tests assert on them.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import zerojax
from benchmarks.frame import Answer, Table, say
from benchmarks.measure import COMPUTE_BYTES
from benchmarks.plain import count, plain_jit
from zerojax.hlo.traffic import collectives

MEGA = 1e6
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step for a batch of all devices.

    Attributes:
      create: ``create(key)`` returns the state.
      step: The step, ``step(state, batch, ...)``, as written for one device.
      batch: ``batch(devices)`` returns the shapes of a batch.
      network: ``network(state)`` returns the arrays whose elements are the unit of the traffic.
      frozen: ``frozen(state)`` returns the parameters that the step takes after the batch and does
        not train; None if it takes none.
      several: Whether the state is a tuple, each of whose parts is an argument of the step.
      settings: Keywords of ``zerojax.zero`` beside the stage.
      bind: ``bind(zero)`` returns the step that calls ``zero`` itself, in place of ``step`` at a
        stage; None if there is none.
    """

    name: str
    create: Callable[..., Any]
    step: Callable[..., Any]
    batch: Callable[[int], Any]
    network: Callable[[Any], Any]
    frozen: Callable[[Any], Any] | None = None
    several: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"bf16": True})
    bind: Callable[[zerojax.Zero], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of a step, for each device.

    Attributes:
      stage: The ZeRO stage; None for plain jit.
      arrays: Elements of the network, P: the unit of the traffic is 2P bytes.
      units: Payload bytes of a step in units of 2P, by kind of collective.
      moved_bytes: Bytes that a device sends in rings.
      argument_bytes, temporary_bytes: Bytes of the program's arguments and temporaries.
      seconds: Seconds of tracing and compiling.
    """

    name: str
    stage: int | None
    devices: int
    arrays: int
    units: dict[str, float]
    moved_bytes: int
    argument_bytes: int
    temporary_bytes: int
    seconds: float

    @property
    def setting(self) -> str:
        return "plain jit" if self.stage is None else f"stage {self.stage}"


def compile_program(program: Program, stage: int | None, devices: int) -> Cost:
    """Compiles one step and reads its costs off it.

    Raises:
      ImportError: The GPU compiler's wheels are not installed.
    """
    began = time.perf_counter()
    lowered, arrays = lower_program(program, stage, devices)
    compiled: Any = lowered.compile()
    units: dict[str, float] = {}
    sent = collectives(compiled.as_text())
    for each in sent:
        share = each.times * each.payload_bytes / (COMPUTE_BYTES * arrays)
        units[each.kind] = units.get(each.kind, 0) + share
    memory = compiled.memory_analysis()
    return Cost(
        name=program.name,
        stage=stage,
        devices=devices,
        arrays=arrays,
        units=units,
        moved_bytes=sum(each.moved_bytes for each in sent),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        seconds=time.perf_counter() - began,
    )


def lower_program(
    program: Program, stage: int | None, devices: int
) -> tuple[jax.stages.Lowered, int]:
    """Lowers a step for absent GPUs; also returns the elements that the traffic is counted in."""
    mesh, batch = zerojax.topology("h100", devices), program.batch(devices)
    if stage is None:
        state = jax.eval_shape(program.create, jax.random.key(0))
        frozen = [] if program.frozen is None else [program.frozen(state)]
        jitted = plain_jit(program.step, mesh, state, *frozen)
        return jitted.lower(state, batch, *frozen), count(program.network(state))
    zero = zerojax.zero(stage=stage, mesh=mesh, **program.settings)
    step = program.step if program.bind is None else program.bind(zero)
    state = zero.abstract_state(program.create, jax.random.key(0))
    states = state if program.several else (state,)
    if program.frozen is None:
        return zero(step).lower(*states, batch), count(program.network(state))
    decorated = zero(step, frozen_argnums=len(states) + 1)
    return decorated.lower(*states, batch, program.frozen(state)), count(program.network(state))


def table(costs: Sequence[Cost]) -> list[list[str]]:
    """The rows of a table: headings, then one for each cost."""
    heads = ["program", "", "devices", "network M", *(f"{kind}s" for kind in KINDS)]
    rows = [[*heads, "arguments MB", "temporaries MB", "seconds"]]
    for each in costs:
        rows.append([
            each.name,
            each.setting,
            str(each.devices),
            f"{each.arrays / MEGA:,.0f}",
            *(f"{each.units.get(kind, 0):.2f}" for kind in KINDS),
            f"{each.argument_bytes / MEGA:,.0f}",
            f"{each.temporary_bytes / MEGA:,.0f}",
            f"{each.seconds:.0f}",
        ])  # fmt: skip
    return rows


def answer(note: str, cases: Sequence[tuple[Program, int | None, int]]) -> Answer:
    """Compiles programs, each at a stage (None for plain jit) on a number of devices."""
    costs = []
    for case in cases:
        costs.append(compile_program(*case))
        say(", ".join(table(costs[-1:])[1]))
    return Answer({"costs": costs}, [note, Table(table(costs), texts=2)])
