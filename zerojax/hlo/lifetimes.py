"""How long a compiled step holds each gathered array.

    lifetimes = gather_lifetimes(compiled.as_text())
    [each for each in lifetimes if each.crosses]     # held from the forward to the backward pass
    peak_gathered_bytes(compiled.as_text())

Positions are indices in the scheduled instructions of one computation: the entry or a loop's body.
"""

import dataclasses
from collections.abc import Iterator

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape, parse
from zerojax.hlo.provenance import Caller, Callers, is_argument
from zerojax.hlo.uses import ValueBuffer, uses_of


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One array that an all-gather produced, and the span for which the program holds it.

    Attributes:
      name: Name of the all-gather; a combined one has a lifetime for each of its arrays.
      computation: Name of its computation, the entry or a loop's body.
      shape: Shape and dtype of the gathered array.
      issued: Position at which the gather starts and its buffer is allocated.
      done: Position at which the gather is over.
      last: Position of the array's last use in any form. Uses in a loop count at the loop's
        position.
      spans: The buffers that hold the array: as gathered, and converted or transposed.
      forward: Whether forward operations use the array.
      backward: Whether backward operations use the array, rematerialised ones among them.
      stacked: Whether a loop's body writes the array into one that outlives the body, as a scan
        keeps its residuals.
      of_parameter: Whether the gather's operand is a floating-point argument of the program, but
        for moves and conversions: a parameter's shard, not an activation.
    """

    name: str
    computation: str
    shape: Shape
    issued: int
    done: int
    last: int
    spans: tuple["Span", ...]
    forward: bool
    backward: bool
    stacked: bool
    of_parameter: bool

    @property
    def bytes(self) -> int:
        return self.shape.bytes

    @property
    def crosses(self) -> bool:
        """Whether the array is held from the forward into the backward pass: used in both, or saved
        by a scan."""
        return self.stacked or (self.forward and self.backward)

    def live_bytes(self, position: int) -> int:
        """Bytes held at a position, in all buffers."""
        return sum(each.shape.bytes for each in self.spans if each.first <= position <= each.last)


@dataclasses.dataclass(frozen=True)
class Span:
    """A buffer, and the positions between which it is held."""

    shape: Shape
    first: int
    last: int


def gather_lifetimes(text: str) -> tuple[Lifetime, ...]:
    """The lifetime of each gathered array in a compiled program's text.

    Uses are followed through bitcasts, copies, conversions, transpositions, tuples, optimization
    barriers and into loops. What JAX writes into ``op_name`` tells the passes apart: an operation
    under ``transpose(...)`` is of the backward pass, one under ``jvp(...)`` alone of the forward.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    program = parse(text)
    callers, computations = schedules(program)
    return tuple(
        each for computation in computations for each in _lifetimes(program, callers, computation)
    )


def peak_gathered_bytes(text: str) -> int:
    """The most bytes of gathered arrays that the program holds at any one time.

    A loop's peak is added to what the computation around the loop holds meanwhile.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    program = parse(text)
    held = gather_lifetimes(text)

    def peak(computation: Computation) -> int:
        here = [each for each in held if each.computation == computation.name]
        return max(
            sum(each.live_bytes(at) for each in here)
            + max((peak(callee) for callee in _nested(program, instruction)), default=0)
            for at, instruction in enumerate(computation.instructions)
        )

    return peak(program.entry)


def _nested(program: HloProgram, instruction: Instruction) -> Iterator[Computation]:
    if instruction.opcode in ("while", "call", "conditional"):
        yield from program.callees(instruction)


def schedules(program: HloProgram) -> tuple[Callers, list[Computation]]:
    """The caller of each loop's body, and the computations that run in turn, the entry first."""
    callers: dict[str, Caller] = {}
    return callers, list(_schedules(program, program.entry, callers))


def _schedules(
    program: HloProgram,
    computation: Computation,
    callers: dict[str, Caller],
) -> Iterator[Computation]:
    """Yield ``computation`` and those it runs in turn; note the caller of each loop's body."""
    yield computation
    for instruction in computation.instructions:
        for callee in _nested(program, instruction):
            if instruction.opcode == "while":
                callers[callee.name] = Caller(computation, instruction)
            yield from _schedules(program, callee, callers)


def _lifetimes(
    program: HloProgram, callers: Callers, computation: Computation
) -> Iterator[Lifetime]:
    for done, instruction in enumerate(computation.instructions):
        if instruction.opcode not in ("all-gather", "all-gather-done"):
            continue
        start = instruction
        if instruction.opcode == "all-gather-done":
            start = computation[instruction.operands[0]]
        combined = len(instruction.shapes) > 1
        for element, shape in enumerate(instruction.shapes):
            gathered = ValueBuffer(shape, computation.position[start.name])
            taken = element if combined else None
            uses = list(uses_of(program, computation, instruction.name, taken, gathered))
            names = [each.op_name for each in uses]
            ends: dict[ValueBuffer, int] = {gathered: done}
            for each in uses:
                ends[each.buffer] = max(each.at, ends.get(each.buffer, 0))
            yield Lifetime(
                name=start.name,
                computation=computation.name,
                shape=shape,
                issued=gathered.born,
                done=done,
                last=max(ends.values()),
                spans=tuple(Span(each.shape, each.born, last) for each, last in ends.items()),
                forward=any("jvp(" in name and "transpose(" not in name for name in names),
                backward=any("transpose(" in name for name in names),
                stacked=any(each.stacks for each in uses),
                of_parameter=shape.dtype.startswith(("f", "bf"))
                and is_argument(program, callers, computation, start.operands[element]),
            )
