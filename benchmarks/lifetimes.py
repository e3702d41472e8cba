"""Spans for which a compiled step holds each gathered array.

    lifetimes = gather_lifetimes(compiled.as_text())
    [each for each in lifetimes if each.crosses]     # held from the forward to the backward pass
    peak_gathered_bytes(compiled.as_text())

Positions are indices in the scheduled instructions of one computation: the entry or a loop's body.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape, parse
from zerojax.hlo.provenance import (
    ALIASES,
    hands_on,
    is_argument,
    moved_from,
    result,
)


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
        """True if the array is held from the forward into the backward pass: used in both, or saved
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
    barriers and into loops. The ``op_name`` of JAX distinguishes the passes: an operation
    under ``transpose(...)`` is of the backward pass, one only under ``jvp(...)`` of the forward.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    program = parse(text)
    return tuple(
        each
        for run in program.walk()
        if run.instruction is run.computation.instructions[0]
        for each in _lifetimes(program, run.computation)
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
            + max((peak(callee) for callee in program.nested(instruction)), default=0)
            for at, instruction in enumerate(computation.instructions)
        )

    return peak(program.entry)


def _lifetimes(program: HloProgram, computation: Computation) -> Iterator[Lifetime]:
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
                and is_argument(program, computation, start.operands[element], gathered=True),
            )


@dataclasses.dataclass(frozen=True)
class ValueBuffer:
    """A buffer that holds a value: as it was produced, converted or transposed.

    Attributes:
      shape: Shape and dtype of the array.
      born: Position from which the buffer is held.
    """

    shape: Shape
    born: int


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a value.

    Attributes:
      buffer: The buffer that is used.
      at: The position in the computation at which the use is over.
      op_name: The operation of the traced Python that uses it, or "".
      stacks: Whether a loop's body writes the value into an array that outlives the body.
    """

    buffer: ValueBuffer
    at: int
    op_name: str = ""
    stacks: bool = False


class Conversion(NamedTuple):
    """A value converted or moved: its instruction, its shape, and the element of a tuple."""

    name: str
    shape: Shape
    element: int | None


def uses_of(
    program: HloProgram,
    computation: Computation,
    name: str,
    element: int | None,
    buffer: ValueBuffer,
) -> Iterator[Use]:
    """The uses of the value ``name``, or of one element of that tuple, in ``computation``."""
    for user in computation.users[name]:
        at = computation.position[user.name]
        if user.opcode == "get-tuple-element":
            if element is None or user.index == element:
                yield from uses_of(program, computation, user.name, None, buffer)
        elif user.opcode == "tuple":
            if user.is_root:
                yield Use(buffer, at)
            for index, operand in enumerate(user.operands):
                if operand == name:
                    yield from uses_of(program, computation, user.name, index, buffer)
        elif user.opcode in ALIASES:
            yield Use(buffer, at)
            yield from uses_of(program, computation, user.name, element, buffer)
        elif user.opcode == "while":
            yield Use(buffer, at)
            for body in program.callees(user):
                yield from _loop_uses(program, computation, user, body, element, buffer)
        else:
            copies = list(_conversions(program, computation, user, name, buffer))
            for copy in copies:
                converted = ValueBuffer(copy.shape, at)
                yield from uses_of(program, computation, copy.name, copy.element, converted)
            # A fusion that does nothing but convert belongs to no pass: its users do.
            converts = bool(copies) and len(computation[copies[0].name].shapes) == len(copies)
            op_name = "" if converts else user.op_name
            yield Use(buffer, _end(computation, user), op_name, _stacks(program, user, name))


def _loop_uses(
    program: HloProgram,
    computation: Computation,
    loop: Instruction,
    body: Computation,
    element: int | None,
    buffer: ValueBuffer,
) -> Iterator[Use]:
    """Uses of one element of a loop's tuple: in its body, and after a body that keeps it."""
    at, parameter = computation.position[loop.name], body.parameter(0)
    if parameter is None:
        return
    for inner in uses_of(program, body, parameter.name, element, buffer):
        yield dataclasses.replace(inner, at=at, buffer=buffer)
    if element is not None and hands_on(body, element):
        yield from uses_of(program, computation, loop.name, element, buffer)


def _conversions(
    program: HloProgram, computation: Computation, user: Instruction, name: str, buffer: ValueBuffer
) -> Iterator[Conversion]:
    """The results of ``user`` that are the same value in another buffer."""
    if user.opcode in ("convert", "transpose", "reshape"):
        yield Conversion(user.name, user.shapes[0], None)
    if user.operation != "fusion":
        return
    done = user
    if user.opcode == "fusion-start":
        done = next(each for each in computation.users[user.name] if each.opcode == "fusion-done")
    for inside in program.callees(user):
        for index, shape in enumerate(done.shapes):
            sources = moved_from(inside, result(inside, index))
            if shape.elements == buffer.shape.elements and any(
                user.operands[number] == name for number in sources
            ):
                yield Conversion(done.name, shape, index if len(done.shapes) > 1 else None)


def _end(computation: Computation, user: Instruction) -> int:
    """Position at which a use is over: an asynchronous one ends with its done."""
    if user.opcode.endswith("-start"):
        ends = [e for e in computation.users[user.name] if e.opcode.endswith(("-done", "-update"))]
        return max([computation.position[user.name], *(_end(computation, each) for each in ends)])
    if user.opcode.endswith("-update"):
        return max(_end(computation, each) for each in computation.users[user.name])
    return computation.position[user.name]


def _stacks(program: HloProgram, user: Instruction, name: str) -> bool:
    """Returns whether ``user`` writes the value, not a result computed from it, into a stack."""
    if user.opcode == "dynamic-update-slice":
        return user.operands[1] == name
    if user.operation != "fusion":
        return False
    return any(
        user.operands[number] == name
        for inside in program.callees(user)
        for update in inside.instructions
        if update.opcode == "dynamic-update-slice"
        for number in moved_from(inside, update.operands[1])
    )
