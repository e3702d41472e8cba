"""Copies between device and host memory in a compiled step.

for each in host_copies(compiled.as_text()):
    print(each.computation, each.inward, each.bytes)
"""

import dataclasses
import re
from collections.abc import Iterator

from zerojax.hlo.program import Computation, HloProgram, Instruction, parse

_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\S+) ")  # arrays with a layout, not tuples
_HOST = ":S(5)"
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
    return tuple(_copies(parse(text), in_host(text)))


def in_host(text: str) -> frozenset[str]:
    """Returns the names of the instructions whose result is an array in host memory."""
    matches = (_LINE.match(line) for line in text.splitlines() if _HOST in line)
    return frozenset(match[1] for match in matches if match and _HOST in match[2])


def _copies(program: HloProgram, host: frozenset[str]) -> Iterator[HostCopy]:
    for computation, each, times, _ in program.walk():
        if each.operation not in _MOVES or each.opcode.endswith(("-done", "-update")):
            continue
        end = _end(computation, each)
        if end.name in host or any(name in host for name in each.operands):
            yield HostCopy(
                name=each.name,
                end=end.name,
                computation=computation.name,
                inward=end.name not in host,
                bytes=_moved(computation, each, end, host),
                times=times,
            )


def _end(computation: Computation, start: Instruction) -> Instruction:
    """Returns the instruction at which a copy ends: ``start`` itself if the copy is synchronous."""
    if not start.opcode.endswith(("-start", "-update")):
        return start
    ends = (e for e in computation.users[start.name] if e.opcode.endswith(("-update", "-done")))
    return _end(computation, next(ends))


def _moved(
    computation: Computation, start: Instruction, end: Instruction, host: frozenset[str]
) -> int:
    """Returns the bytes of a copy: to the device the result, to the host only the operand, since
    the rest of the result is already in host memory."""
    if end.name not in host:
        return sum(shape.bytes for shape in end.shapes)
    on_device = [
        name for name in start.operands if name in computation.position and name not in host
    ]
    shapes = [shape for name in on_device for shape in computation[name].shapes if shape.dims]
    return max((shape.bytes for shape in shapes), default=0)
