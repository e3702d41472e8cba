"""Copies between device and host memory in a compiled step, and what runs while they are under way.

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
      name: the instruction that starts it.
      computation: where it stands, the entry or a loop's body.
      inward: to the device.
      bytes: moved in one run.
      times: how often it runs in a step; a loop whose trips are not known counts once.
      issued, done: positions between which it is under way; the same where nothing else can run.
      spans: computations issued in between: fusions, library calls, loops. A fusion that itself
        copies is none, nor is arithmetic on an index.
      products: matrix products among them, and ``of`` in the whole computation.
      op_name: where it comes from in the traced Python, or "".
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
        """Under way at the same time as another one."""
        if self.computation != other.computation or self.name == other.name:
            return False
        return self.issued < other.done and other.issued < self.done


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """List the copies between device and host memory of a compiled program's text.

    Raises:
      ValueError: the text is not a compiled program's.
    """
    program = parse(text)
    return tuple(_walk(program, program.entry, in_host(text), 1))


def in_host(text: str) -> frozenset[str]:
    """The instructions whose result is an array in host memory."""
    lines = (_LINE.match(line) for line in text.splitlines() if _HOST in line)
    return frozenset(found[1] for found in lines if found and _HOST in found[2])


def _walk(
    program: HloProgram, place: Computation, host: frozenset[str], times: int
) -> Iterator[HostCopy]:
    copies = {}
    for each in place.instructions:
        if each.operation in _MOVES and not each.opcode.endswith(("-done", "-update")):
            end = _end(place, each)
            came = any(name in host for name in each.operands)
            if came or end.name in host:
                copies[each.name] = end
    computing = _computing(place, copies)
    products = [at for at in computing if _multiplies(program, place.instructions[at])]
    for name, end in copies.items():
        start = place[name]
        issued, done = place.position[name], place.position[end.name]
        yield HostCopy(
            name=name,
            computation=place.name,
            inward=end.name not in host,
            bytes=_moved(place, start, end, host),
            times=times,
            issued=issued,
            done=done,
            spans=sum(issued < at < done for at in computing),
            products=sum(issued < at < done for at in products),
            of=len(products),
            op_name=start.op_name or end.op_name,
        )
    for each in place.instructions:
        if each.opcode in ("while", "call", "conditional"):
            trips = (program.trips(each) or 1) if each.opcode == "while" else 1
            for callee in program.callees(each):
                yield from _walk(program, callee, host, times * trips)


def _computing(place: Computation, copies: Mapping[str, Instruction]) -> list[int]:
    """Positions of what computes."""
    return [
        at
        for at, each in enumerate(place.instructions)
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


def _end(place: Computation, start: Instruction) -> Instruction:
    """What waits for a copy: itself where it is not asynchronous."""
    if not start.opcode.endswith(("-start", "-update")):
        return start
    ends = (e for e in place.users[start.name] if e.opcode.endswith(("-update", "-done")))
    return _end(place, next(ends))


def _moved(place: Computation, start: Instruction, end: Instruction, host: frozenset[str]) -> int:
    """Into the device the whole result; out of it what goes in, as the rest lies there already."""
    if end.name not in host:
        return sum(shape.bytes for shape in end.shapes)
    known = [name for name in start.operands if name in place.position and name not in host]
    arrays = [shape for name in known for shape in place[name].shapes if shape.dims]
    return max((shape.bytes for shape in arrays), default=0)
