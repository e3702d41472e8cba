"""Copies between device and host memory in a compiled step.

for each in host_copies(compiled.as_text()):
    print(each.computation, each.inward, each.bytes)
"""

import dataclasses

from zerojax.hlo.program import Computation, Instruction, parse

_MOVES = ("copy", "fusion", "dynamic-slice", "dynamic-update-slice", "async")


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One copy between device and host memory.

    Attributes:
      name: The name of the instruction that starts the copy.
      end: The name of the instruction at which the copy ends; ``name`` for a synchronous copy.
      computation: The name of its computation, the entry or a loop's body.
      inward: Whether the direction is from host to device.
      bytes: Bytes moved in one run.
      times: Runs in a step; a loop with an unknown trip count counts once.
    """

    name: str
    end: str
    computation: str
    inward: bool
    bytes: int
    times: int


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """Returns the copies between device and host memory in a program's text, in scheduled order.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    found = []
    for computation, each, times in parse(text).walk():
        if each.operation not in _MOVES or each.opcode.endswith(("-done", "-update")):
            continue
        end = _end(computation, each)
        operands = [computation[x] for x in each.operands if x in computation.position]
        if not end.in_host and not any(operand.in_host for operand in operands):
            continue
        moved = end.bytes  # to the host only the operand: the rest of the result is there already
        if end.in_host:
            near = (x for operand in operands if not operand.in_host for x in operand.shapes)
            moved = max((shape.bytes for shape in near if shape.dims), default=0)
        found.append(HostCopy(each.name, end.name, computation.name, not end.in_host, moved, times))
    return tuple(found)


def _end(computation: Computation, start: Instruction) -> Instruction:
    """Returns the instruction at which a copy ends: ``start`` itself if the copy is synchronous."""
    if not start.opcode.endswith(("-start", "-update")):
        return start
    ends = (e for e in computation.users[start.name] if e.opcode.endswith(("-update", "-done")))
    return _end(computation, next(ends))
