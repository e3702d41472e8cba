"""Recognition of values that are arguments of a compiled program, only moved or converted."""

import functools

from zerojax.hlo.program import Computation, HloProgram, Instruction

# Opcodes that return their operand's buffer, or a copy of it.
ALIASES = frozenset({"bitcast", "copy", "copy-start", "copy-done", "optimization-barrier"})
# Opcodes that move or convert numbers without computing new ones.
MOVES = ALIASES | {
    "convert", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "select",
}  # fmt: skip


def is_argument(
    program: HloProgram,
    computation: Computation,
    name: str,
    element: int | None = None,
    *,
    gathered: bool = False,
) -> bool:
    """Returns whether a value is an argument of the program, except for moves and conversions.

    Values that a loop carries are traced back to the loop's operands, so that a scan's stacked
    parameters are arguments, but the activations that the scan stacks are not.

    Args:
      program: The compiled program.
      computation: The computation that contains ``name``.
      name: The instruction that produces the value.
      element: The element of that instruction's tuple; None for a value that is not a tuple.
      gathered: Whether an all-gather counts as a move.
    """
    recurse = functools.partial(is_argument, program, gathered=gathered)
    instruction = computation[name]
    if instruction.opcode in ("fusion-done", "async-done", "all-gather-done"):
        instruction = computation[instruction.operands[0]]
    match instruction.operation:
        case "parameter" if computation.name in program.callers and element is not None:
            caller = program.callers[computation.name]
            carried = caller.loop.operands[0]
            return recurse(caller.computation, carried, element)
        case "parameter":
            return computation.name == program.entry_name
        case "get-tuple-element":
            return recurse(computation, instruction.operands[0], instruction.index)
        case "tuple" if element is not None:
            return recurse(computation, instruction.operands[element])
        case "while" if element is not None:
            is_unchanged = all(hands_on(body, element) for body in program.callees(instruction))
            return is_unchanged and recurse(computation, instruction.operands[0], element)
        case "all-gather" if gathered:
            return recurse(computation, instruction.operands[element or 0])
        case "fusion":
            sources: tuple[str, ...] = ()
            for fused in program.callees(instruction):
                numbers = moved_from(fused, result(fused, element))
                sources = tuple(instruction.operands[number] for number in numbers)
            return bool(sources) and all(recurse(computation, s) for s in sources)
    if instruction.opcode not in MOVES:
        return False
    if element is not None:  # a tuple passing through a barrier
        return recurse(computation, instruction.operands[0], element)
    moved = _moved_operands(computation, instruction)
    return bool(moved) and all(recurse(computation, each) for each in moved)


def moved_from(fused: Computation, name: str) -> tuple[int, ...]:
    """Returns the parameter numbers that ``name`` is moved from; empty if ``name`` is computed."""
    instruction = fused[name]
    if instruction.opcode == "parameter":
        return (instruction.index,)
    if instruction.opcode not in MOVES:
        return ()
    sources = [moved_from(fused, each) for each in _moved_operands(fused, instruction)]
    return tuple(number for each in sources for number in each) if all(sources) else ()


def _moved_operands(computation: Computation, instruction: Instruction) -> tuple[str, ...]:
    """Returns the operands whose values appear in the result of one of ``MOVES``.

    A select moves its choices, except constants: a predicate between a value and a constant may
    only mark when the value can be read.
    """
    operands = instruction.operands
    if instruction.opcode == "concatenate":
        return operands
    if instruction.opcode == "select":
        return tuple(each for each in operands[1:] if not _is_constant(computation, each))
    return operands[:1]  # the other operands are a slice's bounds or the padding value


def _is_constant(computation: Computation, name: str) -> bool:
    instruction = computation[name]
    if instruction.opcode == "broadcast":
        return _is_constant(computation, instruction.operands[0])
    return instruction.opcode == "constant"


def result(fused: Computation, element: int | None) -> str:
    """Returns the instruction that produces a fused computation's result, or one element of it."""
    root = fused.root
    if root.opcode != "tuple":
        return root.name
    return root.operands[element or 0]


def hands_on(body: Computation, element: int) -> bool:
    """Returns whether a loop's body returns an element of its tuple unchanged."""
    parameter, root = body.parameter(0), body.root
    if parameter is None or root.opcode != "tuple" or element >= len(root.operands):
        return False
    returned = body[root.operands[element]]
    return (
        returned.opcode == "get-tuple-element"
        and returned.index == element
        and returned.operands == (parameter.name,)
    )
