"""Whether a value in a compiled program is one of its arguments, moved but not computed upon."""

from collections.abc import Mapping

from zerojax.hlo.program import Computation, HloProgram, Instruction

# These hand on the buffer they are given, or a copy of it.
ALIASES = frozenset({"bitcast", "copy", "copy-start", "copy-done", "optimization-barrier"})
# These move or convert numbers without computing new ones.
MOVES = ALIASES | {
    "convert", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "select",
}  # fmt: skip

# For each loop body: the computation its loop stands in, and the loop.
Callers = Mapping[str, tuple[Computation, Instruction]]


def is_argument(
    program: HloProgram, callers: Callers, place: Computation, name: str, element: int | None = None
) -> bool:
    """Whether ``name`` in ``place`` is an argument of the program, but for moves and conversions.

    ``element`` picks one from a tuple. What a loop carries is followed to the loop's start, so a
    scan's stacked parameters are found and the activations it stacks are not.
    """
    instruction = place[name]
    if instruction.opcode in ("fusion-done", "async-done"):
        instruction = place[instruction.operands[0]]
    match instruction.operation:
        case "parameter" if place.name in callers and element is not None:
            outer, loop = callers[place.name]
            return is_argument(program, callers, outer, loop.operands[0], element)
        case "parameter":
            return place.name == program.entry_name
        case "get-tuple-element":
            return is_argument(program, callers, place, instruction.operands[0], instruction.index)
        case "tuple" if element is not None:
            return is_argument(program, callers, place, instruction.operands[element])
        case "while" if element is not None:
            kept = all(hands_on(body, element) for body in program.callees(instruction))
            return kept and is_argument(program, callers, place, instruction.operands[0], element)
        case "fusion":
            sources: tuple[str, ...] = ()
            for inside in program.callees(instruction):
                numbers = moved_from(inside, result(inside, element))
                sources = tuple(instruction.operands[number] for number in numbers)
            return bool(sources) and all(is_argument(program, callers, place, s) for s in sources)
    if instruction.opcode not in MOVES:
        return False
    if element is not None:  # a tuple passing through a barrier
        return is_argument(program, callers, place, instruction.operands[0], element)
    moved = _moved_operands(place, instruction)
    return bool(moved) and all(is_argument(program, callers, place, each) for each in moved)


def moved_from(fused: Computation, name: str) -> tuple[int, ...]:
    """Parameters of a fused computation that ``name`` is moved from; none if it is computed."""
    instruction = fused[name]
    if instruction.opcode == "parameter":
        return (instruction.index,)
    if instruction.opcode not in MOVES:
        return ()
    found = [moved_from(fused, each) for each in _moved_operands(fused, instruction)]
    return tuple(number for each in found for number in each) if all(found) else ()


def _moved_operands(place: Computation, instruction: Instruction) -> tuple[str, ...]:
    """The operands whose numbers appear in the result of one of ``MOVES``.

    Of a selection these are the choices, but for constants: a predicate that picks between a
    value and a constant may only say when the value can be read.
    """
    operands = instruction.operands
    if instruction.opcode == "concatenate":
        return operands
    if instruction.opcode == "select":
        return tuple(each for each in operands[1:] if not _is_constant(place, each))
    return operands[:1]  # the others of a slice say where, those of a padding with what


def _is_constant(place: Computation, name: str) -> bool:
    instruction = place[name]
    if instruction.opcode == "broadcast":
        return _is_constant(place, instruction.operands[0])
    return instruction.opcode == "constant"


def result(fused: Computation, element: int | None) -> str:
    """The instruction that makes a fused computation's result, or one element of it."""
    root = fused.root
    if root.opcode != "tuple":
        return root.name
    return root.operands[element or 0]


def hands_on(body: Computation, element: int) -> bool:
    """Whether a loop's body returns an element of its tuple as it got it."""
    parameter, root = body.parameter(0), body.root
    if parameter is None or root.opcode != "tuple" or element >= len(root.operands):
        return False
    kept = body[root.operands[element]]
    return (
        kept.opcode == "get-tuple-element"
        and kept.index == element
        and kept.operands == (parameter.name,)
    )
