"""Computation beside the copies between device and host memory of a compiled step.

    for each in scheduled_copies(compiled.as_text()):
        print(each.computation, each.inward, each.bytes, each.spans)

Positions are indices in the scheduled instructions of one computation: the entry or a loop's body.
"""

import dataclasses

from zerojax.hlo.program import Computation, HloProgram, Instruction, parse
from zerojax.hlo.transfers import HostCopy, host_copies
from zerojax.hlo.work import FREE

_IDLE = FREE - {"while", "conditional", "call"}  # which compute inside


@dataclasses.dataclass(frozen=True)
class ScheduledCopy(HostCopy):
    """One copy, and what is issued while it is under way.

    Attributes:
      issued: Position at which the copy starts.
      done: Position at which the copy is over; that of ``issued`` for a synchronous copy.
      spans: Number of fusions, library calls and loops that are issued in between. Fusions that
        copy themselves do not count, nor does arithmetic on an index.
      products: Number of matrix products among them.
      of: Number of matrix products that the computation has in all.
      backward: Whether the copy belongs to the backward pass.
    """

    issued: int
    done: int
    spans: int
    products: int
    of: int
    backward: bool

    def beside(self, other: "ScheduledCopy") -> bool:
        """Returns whether the two copies are under way at the same time."""
        if self.computation != other.computation or self.name == other.name:
            return False
        return self.issued < other.done and other.issued < self.done


def scheduled_copies(text: str) -> tuple[ScheduledCopy, ...]:
    """The copies of a compiled program's text, and the computation beside them."""
    program, copies = parse(text), host_copies(text)
    return tuple(_overlap(program, each, copies) for each in copies)


def _overlap(program: HloProgram, copy: HostCopy, copies: tuple[HostCopy, ...]) -> ScheduledCopy:
    computation = program.computations[copy.computation]
    issued, done = computation.position[copy.name], computation.position[copy.end]
    moving = {each.name for each in copies if each.computation == copy.computation}
    computing = _computing(computation, moving)
    products = [at for at in computing if _multiplies(program, computation.instructions[at])]
    op_name = computation[copy.name].op_name or computation[copy.end].op_name
    return ScheduledCopy(
        **vars(copy),
        issued=issued,
        done=done,
        spans=sum(issued < at < done for at in computing),
        products=sum(issued < at < done for at in products),
        of=len(products),
        backward="transpose(" in op_name,
    )


def _computing(computation: Computation, moving: set[str]) -> list[int]:
    """Positions of the instructions that compute."""
    return [
        at
        for at, each in enumerate(computation.instructions)
        if each.opcode not in _IDLE
        and each.operation not in ("copy", "async")
        and not each.opcode.endswith(("-start", "-update", "-done"))
        and each.name not in moving
        and "AllocateBuffer" not in each.attributes
        and any(shape.dims or "f" in shape.dtype for shape in each.shapes)
    ]


def _multiplies(program: HloProgram, each: Instruction) -> bool:
    if each.opcode == "custom-call":
        return "gemm" in each.attributes
    inside = (i for callee in program.callees(each) for i in callee.instructions)
    return each.opcode == "dot" or (
        each.opcode == "fusion" and any(i.opcode == "dot" for i in inside)
    )
