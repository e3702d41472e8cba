"""The uses of a value in a compiled program, in every form in which it is passed on."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape
from zerojax.hlo.provenance import ALIASES, hands_on, moved_from, result


@dataclasses.dataclass(frozen=True)
class ValueBuffer:
    """A buffer that holds a value: as it was made, converted or transposed.

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
      at: Position of the use.
      op_name: Origin of the use in the traced Python, or "".
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
    """Whether ``user`` writes the value itself, not something computed of it, into a stack."""
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
