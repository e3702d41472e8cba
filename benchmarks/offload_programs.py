"""Compile all programs of one offloaded step for absent GPUs, and write down the bytes.

    costs = compile_costs(OffloadCase(stage=3, optimizer=True, param=True, devices=1, scan=True))
    costs.peak.device_bytes, costs.host_bytes

The program is that of ``measure.py``. ``offload.py`` prints these figures, and the tests assert
on them.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import zerojax
from benchmarks.measure import Case, create_state_of, train_step_of
from benchmarks.overlap import ScheduledCopy, scheduled_copies
from zerojax.foresight.costs import lying_between
from zerojax.hlo.program import parse
from zerojax.offload.groups import LARGEST
from zerojax.plan.places import DEVICE, HOST

GRADIENTS, STEP = "gradients", "step"
MOMENTS_AND_MASTER = 12  # bytes of an element's state under AdamW


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadCase(Case):
    """A step to compile.

    Attributes:
      optimizer, param: whether optimizer state and compute parameters are offloaded to the host.
      sub_group_size: elements of a sub-group; None for the config's default.
    """

    micro_batch: int = 1
    optimizer: bool = False
    param: bool = False
    sub_group_size: int | None = None

    @property
    def where(self) -> str:
        gpus = "one GPU" if self.devices == 1 else f"{self.devices} GPUs"
        return f"stage {self.stage}, {gpus}" + ("" if self.scan else ", unrolled")

    @property
    def config(self) -> dict[str, Any]:
        places = {"offload_optimizer": self.optimizer, "offload_param": self.param}
        zero: dict[str, Any] = {"stage": self.stage}
        zero |= {key: {"device": "cpu"} for key, wanted in places.items() if wanted}
        zero |= {} if self.sub_group_size is None else {"sub_group_size": self.sub_group_size}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        }

    @property
    def sub_group_bytes(self) -> int:
        """Masters and moments of one sub-group."""
        size = LARGEST if self.sub_group_size is None else min(self.sub_group_size, LARGEST)
        return MOMENTS_AND_MASTER * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that one program takes of a device. Sizes in bytes.

    Attributes:
      argument, temporary: bytes of arguments and temporaries, by XLA's ``memory_analysis``.
      result: bytes of results that do not take the place of arguments; no part of ``temporary``.
      resting: bytes on the device while the program runs that are no argument of it.
      host_temporary: bytes of host memory that the program takes besides the state there.
      copies: its copies between device and host memory.
      seconds: seconds that its compile took.
    """

    name: str
    argument: int
    temporary: int
    result: int
    resting: int
    host_temporary: int
    copies: tuple[ScheduledCopy, ...] = dataclasses.field(repr=False)
    seconds: float

    @property
    def device_bytes(self) -> int:
        return self.argument + self.temporary + self.result + self.resting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Memory that a step takes of each device and of its host. Sizes in bytes.

    Attributes:
      parameters: the model's number of parameters.
      state_bytes: masters, moments and the rest of the state on the device.
      between_bytes: bytes on the device between programs, as the program of the gradients
        takes and leaves it.
      planned_bytes: gradients and compute parameters on the device, by the plan.
      host_bytes: the most host memory: state, compute parameters and gradients there.
      programs: the step's programs in the order in which they run.
    """

    case: OffloadCase
    parameters: int
    state_bytes: int
    between_bytes: int
    planned_bytes: int
    host_bytes: int
    programs: tuple[Footprint, ...]

    @property
    def peak(self) -> Footprint:
        return max(self.programs, key=lambda p: p.device_bytes)

    @property
    def gradients(self) -> Footprint:
        """The program that computes the gradients; without offload the complete step."""
        return self.programs[0]

    @property
    def updates(self) -> tuple[Footprint, ...]:
        return self.programs[1:]

    @property
    def update_peak(self) -> Footprint:
        return max(self.updates, key=lambda p: p.device_bytes)

    @property
    def sub_groups(self) -> float:
        """Bytes that the updates hold beyond gradients and compute parameters, in sub-groups."""
        return (self.update_peak.device_bytes - self.planned_bytes) / self.case.sub_group_bytes


def compile_costs(
    case: OffloadCase,
    enough: Callable[[Footprint], bool] = lambda footprint: False,
    note: Callable[[str], None] = lambda name: None,
) -> Costs:
    """Compile the programs of a case and measure them.

    Args:
      case: what to compile.
      enough: called with each program; where it is True the others are left out.
      note: called with the name of each program before it is compiled.

    Raises:
      ImportError: the GPU compiler's wheels are not installed.
    """
    zero = zerojax.zero(case.config, mesh=zerojax.topology(case.device, case.devices))
    state = zero.abstract_state(create_state_of(case.model), jax.random.key(0))
    plan = zero.plan(state)
    programs: list[Footprint] = []
    between = host = 0
    for name, program, _ in zero(train_step_of(case.model)).programs(state, case.batch):
        note(name)
        began = time.perf_counter()
        executable: Any = program.compile()
        seconds = time.perf_counter() - began
        memory, text = executable.memory_analysis(), executable.as_text()
        result = memory.output_size_in_bytes - memory.alias_size_in_bytes
        if name == GRADIENTS:
            between = memory.argument_size_in_bytes + result
            host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
        known = name in (GRADIENTS, STEP)
        programs.append(
            Footprint(
                name=name,
                argument=memory.argument_size_in_bytes,
                temporary=memory.temp_size_in_bytes,
                result=result,
                resting=0 if known else between - lying_between(parse(text)),
                host_temporary=memory.host_temp_size_in_bytes,
                copies=scheduled_copies(text),
                seconds=seconds,
            )
        )
        if enough(programs[-1]):
            break
    return Costs(
        case=case,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        state_bytes=plan.bytes_in(DEVICE),
        between_bytes=between,
        planned_bytes=_planned(plan) if between else 0,
        host_bytes=plan.bytes_in(HOST) + host + max(each.host_temporary for each in programs),
        programs=tuple(programs),
    )


class Compiled:
    """Costs of cases, each compiled once.

    Args:
      note: called with the description of each compile.
      known: cases compiled before; others are added.
    """

    def __init__(self, note: Callable[[str], None], known: dict[OffloadCase, Costs]) -> None:
        self._note, self._known = note, known

    def __call__(self, case: OffloadCase, room: int | None = None) -> Costs:
        """The costs of a case; no program is compiled after one that takes more than ``room``."""
        if case not in self._known:
            size = f"{case.n_layer} layers of {case.n_embd}"
            costs = compile_costs(
                case,
                enough=lambda p: room is not None and p.device_bytes > room,
                note=lambda name: self._note(f"compiling {case.where}, {size}: {name}"),
            )
            if costs.peak.device_bytes > (room or costs.peak.device_bytes):
                return costs  # not all of it
            self._known[case] = costs
        return self._known[case]


def _planned(plan: zerojax.Plan) -> int:
    """Bytes of compute parameters, and of gradients in their dtype, on one device."""
    pairs = zip(plan.compute, plan.gradients(), strict=True)
    return sum(
        (now.bytes_per_device if now.place == DEVICE else 0)
        + (grad.bytes_per_device * jnp.dtype(now.dtype).itemsize // jnp.dtype(grad.dtype).itemsize)
        * (grad.place == DEVICE)
        for now, grad in pairs
    )
