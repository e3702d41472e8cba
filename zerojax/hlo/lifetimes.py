"""How long a compiled step keeps what it has gathered.

    lifetimes = gather_lifetimes(compiled.as_text())
    [each for each in lifetimes if each.crosses]     # held from the forward to the backward pass
    peak_gathered_bytes(compiled.as_text())

Positions are indices in the scheduled instructions of one computation: the entry or a loop's body.
"""

import dataclasses
from collections.abc import Iterator

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape, parse
from zerojax.hlo.provenance import Callers, is_argument
from zerojax.hlo.uses import ValueBuffer, uses_of


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One array that an all-gather produced, and the span in which it is held.

    Attributes:
      name: the all-gather instruction; a combined one has a lifetime for each of its arrays.
      computation: where it stands, the entry or a loop's body.
      shape: the gathered array.
      issued: position at which the gather starts, and its buffer is taken.
      done: position at which the gathered array is there.
      last: position of its last use in any form. Uses in a loop count at the loop's position.
      spans: the buffers that hold it: the gathered array, and arrays converted or transposed from
        it.
      forward: it is used by forward operations.
      backward: it is used by backward operations, rematerialised ones among them.
      stacked: a loop's body writes it into an array that outlives the body, as the residuals of
        a scan are kept.
      of_parameter: what is gathered is an argument of the program, but for moves and
        conversions, and of floating point: a parameter's shard, not an activation.
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
        """HeldBuffer from the forward into the backward pass: used in both, or saved by a scan."""
        return self.stacked or (self.forward and self.backward)

    def live_bytes(self, position: int) -> int:
        """Bytes held at a position, in all forms."""
        return sum(each.shape.bytes for each in self.spans if each.first <= position <= each.last)


@dataclasses.dataclass(frozen=True)
class Span:
    """A buffer, and the positions between which it is held."""

    shape: Shape
    first: int
    last: int


def gather_lifetimes(text: str) -> tuple[Lifetime, ...]:
    """Return the lifetime of each gathered array of a compiled program's text.

    Uses are followed through bitcasts, copies, conversions, transpositions, tuples, optimization
    barriers and into loops.
    Forward and backward are told apart by what JAX writes into ``op_name``: an operation under
    ``transpose(...)`` belongs to the backward pass, one under ``jvp(...)`` alone to the forward.

    Raises:
      ValueError: the text is not a compiled program's.
    """
    program = parse(text)
    callers, places = schedules(program)
    return tuple(each for place in places for each in _lifetimes(program, callers, place))


def peak_gathered_bytes(text: str) -> int:
    """Return the most bytes of gathered arrays that are held at any one time.

    A loop's peak is added to what its surroundings hold while it runs.

    Raises:
      ValueError: the text is not a compiled program's.
    """
    program = parse(text)
    held = gather_lifetimes(text)

    def peak(place: Computation) -> int:
        here = [each for each in held if each.computation == place.name]
        return max(
            sum(each.live_bytes(at) for each in here)
            + max((peak(callee) for callee in _nested(program, instruction)), default=0)
            for at, instruction in enumerate(place.instructions)
        )

    return peak(program.entry)


def _nested(program: HloProgram, instruction: Instruction) -> Iterator[Computation]:
    if instruction.opcode in ("while", "call", "conditional"):
        yield from program.callees(instruction)


def schedules(program: HloProgram) -> tuple[Callers, list[Computation]]:
    """The computations that run in turn, the entry first, and who calls each loop's body."""
    callers: dict[str, tuple[Computation, Instruction]] = {}
    return callers, list(_schedules(program, program.entry, callers))


def _schedules(
    program: HloProgram,
    place: Computation,
    callers: dict[str, tuple[Computation, Instruction]],
) -> Iterator[Computation]:
    """Yield ``place`` and what it runs in turn, and note who calls each loop's body."""
    yield place
    for instruction in place.instructions:
        for callee in _nested(program, instruction):
            if instruction.opcode == "while":
                callers[callee.name] = (place, instruction)
            yield from _schedules(program, callee, callers)


def _lifetimes(program: HloProgram, callers: Callers, place: Computation) -> Iterator[Lifetime]:
    for done, instruction in enumerate(place.instructions):
        if instruction.opcode not in ("all-gather", "all-gather-done"):
            continue
        start = instruction
        if instruction.opcode == "all-gather-done":
            start = place[instruction.operands[0]]
        combined = len(instruction.shapes) > 1
        for element, shape in enumerate(instruction.shapes):
            form = ValueBuffer(shape, place.position[start.name])
            taken = element if combined else None
            found = list(uses_of(program, place, instruction.name, taken, form))
            names = [each.op_name for each in found]
            ends: dict[ValueBuffer, int] = {form: done}
            for each in found:
                ends[each.form] = max(each.at, ends.get(each.form, 0))
            yield Lifetime(
                name=start.name,
                computation=place.name,
                shape=shape,
                issued=form.born,
                done=done,
                last=max(ends.values()),
                spans=tuple(Span(each.shape, each.born, last) for each, last in ends.items()),
                forward=any("jvp(" in name and "transpose(" not in name for name in names),
                backward=any("transpose(" in name for name in names),
                stacked=any(each.stacks for each in found),
                of_parameter=shape.dtype.startswith(("f", "bf"))
                and is_argument(program, callers, place, start.operands[element]),
            )
