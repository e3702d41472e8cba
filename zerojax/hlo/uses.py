"""What uses a value in a compiled program, in whatever form it is handed on."""

import dataclasses
from collections.abc import Iterator

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape
from zerojax.hlo.provenance import ALIASES, hands_on, moved_from, result


@dataclasses.dataclass(frozen=True)
class ValueBuffer:
    """A buffer that holds the value: the array itself, or one converted or transposed from it.

    ``born`` is the position from which it is held.
    """

    shape: Shape
    born: int


@dataclasses.dataclass(frozen=True)
class Use:
    """One use: of which form, at which position, and whether it is stacked by a loop's body."""

    form: ValueBuffer
    at: int
    op_name: str = ""
    stacks: bool = False


def uses_of(
    program: HloProgram, place: Computation, name: str, element: int | None, form: ValueBuffer
) -> Iterator[Use]:
    """Yield what uses the value ``name`` (or one element of that tuple) in ``place``."""
    for user in place.users[name]:
        at = place.position[user.name]
        if user.opcode == "get-tuple-element":
            if element is None or user.index == element:
                yield from uses_of(program, place, user.name, None, form)
        elif user.opcode == "tuple":
            if user.is_root:
                yield Use(form, at)
            for index, operand in enumerate(user.operands):
                if operand == name:
                    yield from uses_of(program, place, user.name, index, form)
        elif user.opcode in ALIASES:
            yield Use(form, at)
            yield from uses_of(program, place, user.name, element, form)
        elif user.opcode == "while":
            yield Use(form, at)
            for body in program.callees(user):
                yield from _loop_uses(program, place, user, body, element, form)
        else:
            copies = list(_converted(program, place, user, name, form))
            for copied, shape, part in copies:
                yield from uses_of(program, place, copied, part, ValueBuffer(shape, at))
            # A fusion that does nothing but convert belongs to no pass: its users do.
            converts = bool(copies) and len(place[copies[0][0]].shapes) == len(copies)
            op_name = "" if converts else user.op_name
            yield Use(form, _end(place, user), op_name, _stacks(program, user, name))


def _loop_uses(
    program: HloProgram,
    place: Computation,
    loop: Instruction,
    body: Computation,
    element: int | None,
    form: ValueBuffer,
) -> Iterator[Use]:
    """Uses of an element of a loop's tuple in its body, and after it if the body hands it on."""
    at, parameter = place.position[loop.name], body.parameter(0)
    if parameter is None:
        return
    for inner in uses_of(program, body, parameter.name, element, form):
        yield dataclasses.replace(inner, at=at, form=form)
    if element is not None and hands_on(body, element):
        yield from uses_of(program, place, loop.name, element, form)


def _converted(
    program: HloProgram, place: Computation, user: Instruction, name: str, form: ValueBuffer
) -> Iterator[tuple[str, Shape, int | None]]:
    """Yield the results of ``user`` that are the same value in another form.

    Each is an instruction, its shape and, where ``user`` has several results, which one.
    """
    if user.opcode in ("convert", "transpose", "reshape"):
        yield user.name, user.shapes[0], None
    if user.operation != "fusion":
        return
    done = user
    if user.opcode == "fusion-start":
        done = next(each for each in place.users[user.name] if each.opcode == "fusion-done")
    for inside in program.callees(user):
        for index, shape in enumerate(done.shapes):
            sources = moved_from(inside, result(inside, index))
            if shape.elements == form.shape.elements and any(
                user.operands[number] == name for number in sources
            ):
                yield done.name, shape, index if len(done.shapes) > 1 else None


def _end(place: Computation, user: Instruction) -> int:
    """Position at which a use is over: an asynchronous one ends with its done."""
    if user.opcode.endswith("-start"):
        ends = [e for e in place.users[user.name] if e.opcode.endswith(("-done", "-update"))]
        return max([place.position[user.name], *(_end(place, each) for each in ends)])
    if user.opcode.endswith("-update"):
        return max(_end(place, each) for each in place.users[user.name])
    return place.position[user.name]


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
