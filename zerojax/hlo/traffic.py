"""What a compiled step sends between devices, counted from its text.

for each in collectives(compiled.as_text()):
    print(each.kind, each.dtypes, each.payload_bytes, each.times, each.moved_bytes)
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape, parse

# Bytes a device sends per byte of payload, in a ring of n.
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
    """One collective of a compiled program; an asynchronous start and done are one.

    Attributes:
      kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
      shapes: the arrays it moves, whole: gathered, or as they were before scattering. XLA
        combines collectives, so there may be many.
      group_size: the devices that take part together.
      times: how often it runs in a step: the product of the enclosing loops' trip counts.
      exact: False where an enclosing loop's trip count is not known. That loop counts once.
      name: the instruction's.
      computation: the computation it stands in.
      op_name: where it comes from in the traced Python, or "".
    """

    kind: str
    shapes: tuple[Shape, ...]
    group_size: int
    times: int
    exact: bool
    name: str
    computation: str
    op_name: str

    @property
    def payload_bytes(self) -> int:
        """Bytes of ``shapes`` together, for one run."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes moved, without repeats, in the order of the most bytes."""
        sizes = self.bytes_by_dtype
        return tuple(sorted(sizes, key=lambda dtype: -sizes[dtype]))

    @property
    def bytes_by_dtype(self) -> Mapping[str, int]:
        """``payload_bytes`` apart by dtype: a combined collective may mix them."""
        sizes: dict[str, int] = {}
        for shape in self.shapes:
            sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.bytes
        return sizes

    @property
    def moved_bytes(self) -> int:
        """Bytes each device sends in a step, over a ring of n devices.

        ``times * payload * (n-1)/n`` for all-gather, reduce-scatter and all-to-all, twice that
        for all-reduce, the payload for a permute.
        """
        return round(self.times * self.payload_bytes * _RING[self.kind](self.group_size))


def collectives(text: str) -> tuple[Collective, ...]:
    """List the collectives of a compiled program's text, in scheduled order.

    Those in loops, calls, conditionals (every branch) and asynchronous computations are found;
    a computation called from two places counts in each.

    Raises:
      ValueError: the text is not a compiled program's.
    """
    program = parse(text)
    return tuple(_walk(program, program.entry, times=1, exact=True))


def moved_by_kind(found: Iterable[Collective]) -> dict[str, int]:
    """Sum ``moved_bytes`` by kind; kinds that do not occur are left out."""
    moved: dict[str, int] = {}
    for each in found:
        moved[each.kind] = moved.get(each.kind, 0) + each.moved_bytes
    return moved


def _walk(
    program: HloProgram, computation: Computation, *, times: int, exact: bool
) -> Iterator[Collective]:
    for each in computation.instructions:
        kind = each.opcode.removesuffix("-done")
        if kind in _RING:
            started = computation[each.operands[0]] if each.opcode.endswith("-done") else each
            group = group_size(started, program.devices)
            yield Collective(
                kind=kind,
                shapes=_whole(started, each.shapes, group),
                group_size=group,
                times=times,
                exact=exact,
                name=started.name,
                computation=computation.name,
                op_name=started.op_name or each.op_name,
            )
        if each.operation in _RING:
            continue
        looped = each.opcode == "while"
        trips = program.trips(each) if looped else 1
        for callee in program.callees(each):
            yield from _walk(
                program, callee, times=times * (trips or 1), exact=exact and trips is not None
            )


def _whole(started: Instruction, results: tuple[Shape, ...], group: int) -> tuple[Shape, ...]:
    """A collective's arrays as they are gathered, or were before scattering."""
    if started.operation != "reduce-scatter":
        return results
    found = re.search(r"\bdimensions=\{(\d+)\}", started.attributes)
    scattered = int(found[1]) if found else 0
    return tuple(
        Shape(
            each.dtype,
            tuple(size * group if at == scattered else size for at, size in enumerate(each.dims)),
        )
        for each in results
    )


def group_size(instruction: Instruction, devices: int) -> int:
    """Devices in one group of a collective, from any of the forms XLA prints.

    ``{{0,1},{2,3}}`` lists them, ``[2,4]<=[8]`` counts groups by members,
    ``mesh['x'=4,'y'=2] {'x'}`` names mesh axes, and ``{}`` is all devices.
    """
    attributes = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return len(set(re.findall(r"\d+", pairs[1])))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"['\"]?([\w.]+)['\"]?=(\d+)", mesh[1]))
        named = re.findall(r"['\"]([\w.]+)['\"](?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    return devices
