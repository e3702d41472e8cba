"""Copies between device and host memory in a compiled step, and what runs beside them.

for each in host_copies(compiled.as_text()):
    print(each.computation, each.inward, each.bytes, each.spans)

Positions are indices in the scheduled instructions of one computation: the entry or a loop's body.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from zerojax.hlo.program import Computation, HloProgram, Instruction, parse
from zerojax.hlo.work import FREE

_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\S+) ")  # not tuples: an array's own layout
_HOST = ":S(5)"
_MOVES = ("copy", "fusion", "dynamic-slice", "dynamic-update-slice", "async")
_IDLE = FREE - {"while", "conditional", "call"}  # which compute inside


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One copy between device and host memory.

    Attributes:
      name: Name of the instruction that starts the copy.
      computation: Name of its computation, the entry or a loop's body.
      inward: Whether the copy goes to the device.
      bytes: Bytes moved in one run.
      times: Runs in a step; a loop whose trip count is not known counts once.
      issued: Position at which the copy starts.
      done: Position at which the copy is over; that of ``issued`` for a synchronous copy.
      spans: How many fusions, library calls and loops are issued in between. Fusions that copy
        themselves do not count, nor does arithmetic on an index.
      products: How many matrix products are among them.
      of: How many matrix products the whole computation has.
      op_name: Origin of the copy in the traced Python, or "".
    """

    name: str
    computation: str
    inward: bool
    bytes: int
    times: int
    issued: int
    done: int
    spans: int
    products: int
    of: int
    op_name: str

    @property
    def backward(self) -> bool:
        return "transpose(" in self.op_name

    def beside(self, other: "HostCopy") -> bool:
        """Whether the two copies are under way at the same time."""
        if self.computation != other.computation or self.name == other.name:
            return False
        return self.issued < other.done and other.issued < self.done


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """The copies between device and host memory in a compiled program's text.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    program = parse(text)
    return tuple(_walk(program, program.entry, in_host(text), 1))


def in_host(text: str) -> frozenset[str]:
    """Names of the instructions whose result is an array in host memory."""
    lines = (_LINE.match(line) for line in text.splitlines() if _HOST in line)
    return frozenset(match[1] for match in lines if match and _HOST in match[2])


def _walk(
    program: HloProgram, computation: Computation, host: frozenset[str], times: int
) -> Iterator[HostCopy]:
    copies = {}
    for each in computation.instructions:
        if each.operation in _MOVES and not each.opcode.endswith(("-done", "-update")):
            end = _end(computation, each)
            came = any(name in host for name in each.operands)
            if came or end.name in host:
                copies[each.name] = end
    computing = _computing(computation, copies)
    products = [at for at in computing if _multiplies(program, computation.instructions[at])]
    for name, end in copies.items():
        start = computation[name]
        issued, done = computation.position[name], computation.position[end.name]
        yield HostCopy(
            name=name,
            computation=computation.name,
            inward=end.name not in host,
            bytes=_moved(computation, start, end, host),
            times=times,
            issued=issued,
            done=done,
            spans=sum(issued < at < done for at in computing),
            products=sum(issued < at < done for at in products),
            of=len(products),
            op_name=start.op_name or end.op_name,
        )
    for each in computation.instructions:
        trips = (program.trips(each) or 1) if each.opcode == "while" else 1
        for callee in program.nested(each):
            yield from _walk(program, callee, host, times * trips)


def _computing(computation: Computation, copies: Mapping[str, Instruction]) -> list[int]:
    """Positions of the instructions that compute."""
    return [
        at
        for at, each in enumerate(computation.instructions)
        if each.opcode not in _IDLE
        and each.operation not in ("copy", "async")
        and not each.opcode.endswith(("-start", "-update", "-done"))
        and each.name not in copies
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


def _end(computation: Computation, start: Instruction) -> Instruction:
    """The instruction at which a copy is over: its own where the copy is synchronous."""
    if not start.opcode.endswith(("-start", "-update")):
        return start
    ends = (e for e in computation.users[start.name] if e.opcode.endswith(("-update", "-done")))
    return _end(computation, next(ends))


def _moved(
    computation: Computation, start: Instruction, end: Instruction, host: frozenset[str]
) -> int:
    """Bytes of a copy: inward all of the result, outward the operand, as the rest lies there."""
    if end.name not in host:
        return sum(shape.bytes for shape in end.shapes)
    known = [name for name in start.operands if name in computation.position and name not in host]
    arrays = [shape for name in known for shape in computation[name].shapes if shape.dims]
    return max((shape.bytes for shape in arrays), default=0)
