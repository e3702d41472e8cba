"""Whether a value in a compiled program is one of its arguments, moved but not computed upon."""

from collections.abc import Mapping

from zerojax.foresight.hlo import Computation, Instruction, Program

# These hand on the buffer they are given, or a copy of it.
ALIASES = frozenset({"bitcast", "copy", "copy-start", "copy-done", "optimization-barrier"})
# These move or convert numbers without computing new ones.
MOVES = ALIASES | {
    "parameter", "constant", "convert", "reshape", "transpose", "slice", "dynamic-slice",
    "get-tuple-element", "tuple", "iota", "concatenate", "pad",
}  # fmt: skip
# On scalars these say where to slice, as a scan's index does.
_INDEX_ARITHMETIC = frozenset({"add", "subtract", "multiply", "compare", "select", "clamp"})

# For each loop body: the computation its loop stands in, and the loop.
Callers = Mapping[str, tuple[Computation, Instruction]]


def is_argument(program: Program, callers: Callers, place: Computation, name: str) -> bool:
    """Whether ``name`` in ``place`` is an argument of the program, but for moves and conversions.

    What a loop carries is followed to the loop's start, so a scan's stacked parameters are found
    and the activations it stacks are not.
    """
    instruction = place[name]
    if instruction.opcode == "parameter":
        return place.name == program.entry_name
    if instruction.opcode == "get-tuple-element":
        return _element_is_argument(program, callers, place, instruction)
    if instruction.opcode == "fusion-done":
        instruction = place[instruction.operands[0]]
    if instruction.operation == "fusion":
        if not all(only_moves(inside) for inside in program.callees(instruction)):
            return False
    elif instruction.opcode not in MOVES:
        return False
    arrays = [each for each in instruction.operands if any(s.dims for s in place[each].shapes)]
    return bool(arrays) and all(is_argument(program, callers, place, each) for each in arrays)


def _element_is_argument(
    program: Program, callers: Callers, place: Computation, taken: Instruction
) -> bool:
    whole = place[taken.operands[0]]
    if whole.opcode == "parameter" and place.name in callers:
        place, loop = callers[place.name]
        whole = place[loop.operands[0]]
    elif whole.opcode == "while":
        if not all(hands_on(body, taken.index) for body in program.callees(whole)):
            return False
        whole = place[whole.operands[0]]
    while whole.opcode in ALIASES:
        whole = place[whole.operands[0]]
    if whole.opcode == "tuple":
        return is_argument(program, callers, place, whole.operands[taken.index])
    return whole.opcode == "fusion" and is_argument(program, callers, place, whole.name)


def only_moves(computation: Computation) -> bool:
    """Whether all instructions move, convert or find out where to slice."""
    return all(
        each.opcode in MOVES
        or (each.opcode in _INDEX_ARITHMETIC and not any(shape.dims for shape in each.shapes))
        for each in computation.instructions
    )


def hands_on(body: Computation, element: int) -> bool:
    """Whether a loop's body returns an element of its tuple as it got it."""
    parameter, root = body.parameter(0), body.root
    if parameter is None or root.opcode != "tuple" or element >= len(root.operands):
        return False
    result = body[root.operands[element]]
    return (
        result.opcode == "get-tuple-element"
        and result.index == element
        and result.operands == (parameter.name,)
    )
