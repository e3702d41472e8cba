"""The collectives of a compiled step.

for each in collectives(compiled.as_text()):
    print(each.kind, each.dtypes, each.payload_bytes, each.times, each.moved_bytes)
"""

import dataclasses
import re
from collections.abc import Mapping

from zerojax.hlo.groups import Groups, replica_groups
from zerojax.hlo.program import Instruction, Shape, parse

# Bytes that a device sends for each byte of payload, in a ring of n devices.
_RING = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0 if n > 1 else 0.0,
    "collective-broadcast": lambda n: 1.0 if n > 1 else 0.0,
}
KINDS = tuple(_RING)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program; an asynchronous start and done count as one.

    Attributes:
      kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
      shapes: The arrays it moves: after gathering, or before scattering. A collective that XLA
        combined has several.
      groups: The groups of participating devices, by their numbers in the program.
      times: Runs in a step: the product of the enclosing loops' trip counts; a loop whose trip
        count is not known counts once.
      name: The name of the instruction.
      computation: The name of its computation.
      op_name: The origin of the collective in the traced Python, or "".
    """

    kind: str
    shapes: tuple[Shape, ...]
    groups: Groups
    times: int
    name: str
    computation: str
    op_name: str

    @property
    def group_size(self) -> int:
        """The number of devices in a group; two for a permute."""
        return len(self.groups[0])

    @property
    def payload_bytes(self) -> int:
        """The bytes of all ``shapes``, in one run."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes moved, in descending order of bytes."""
        sizes = self.bytes_by_dtype
        return tuple(sorted(sizes, key=lambda dtype: -sizes[dtype]))

    @property
    def bytes_by_dtype(self) -> Mapping[str, int]:
        """``payload_bytes`` by dtype: a combined collective may mix dtypes."""
        sizes: dict[str, int] = {}
        for shape in self.shapes:
            sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.bytes
        return sizes

    @property
    def moved_bytes(self) -> int:
        """Bytes that each device sends in a step, over a ring of n devices.

        ``times * payload * (n-1)/n`` for all-gather, reduce-scatter and all-to-all, twice that
        for all-reduce, the payload for a permute.
        """
        return round(self.times * ring_bytes(self.kind, self.payload_bytes, self.group_size))


def ring_bytes(kind: str, payload: int, devices: int) -> float:
    """Returns the bytes that each device sends in one run of a collective over a ring.

    Example:
      >>> ring_bytes("all-gather", 800, 8), ring_bytes("all-reduce", 800, 8)
      (700.0, 1400.0)
    """
    return payload * _RING[kind](devices)


def collectives(text: str) -> tuple[Collective, ...]:
    """Returns the collectives of a compiled program's text, in scheduled order.

    The result includes collectives in loops, calls, conditionals (every branch) and asynchronous
    computations; a computation called from two places counts twice.

    Raises:
      ValueError: The text is not a compiled program's.
    """
    program, found = parse(text), []
    for computation, each, times in program.walk(fused=True):
        kind = each.opcode.removesuffix("-done")
        if kind in _RING:
            started = computation[each.operands[0]] if each.opcode.endswith("-done") else each
            groups = replica_groups(started, program.devices)
            found.append(
                Collective(
                    kind=kind,
                    shapes=_full_shapes(started, each.shapes, len(groups[0])),
                    groups=groups,
                    times=times,
                    name=started.name,
                    computation=computation.name,
                    op_name=started.op_name or each.op_name,
                )
            )
    return tuple(found)


def _full_shapes(started: Instruction, results: tuple[Shape, ...], group: int) -> tuple[Shape, ...]:
    """Returns a collective's arrays after gathering, or before scattering."""
    if started.operation != "reduce-scatter":
        return results
    match = re.search(r"\bdimensions=\{(\d+)\}", started.attributes)
    axis = int(match[1]) if match else 0
    return tuple(
        Shape(each.dtype, (*each.dims[:axis], group * each.dims[axis], *each.dims[axis + 1 :]))
        for each in results
    )
