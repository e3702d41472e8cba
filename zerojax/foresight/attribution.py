"""What the bytes of a compiled step are: parameters, gradients, activations, ..."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Sequence

from jax.sharding import Mesh

from zerojax.hlo.assignment import HeldBuffer
from zerojax.hlo.lifetimes import schedules
from zerojax.hlo.program import Computation, HloProgram, Instruction, parse
from zerojax.hlo.provenance import Callers, is_argument
from zerojax.hlo.transfers import in_host
from zerojax.plan.plan import Leaf, Plan, layout
from zerojax.xla import lowered

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
GATHERED, ACTIVATIONS, LOGITS = "gathered parameters", "activations", "logits"
BATCH, OTHER, GAPS = "batch", "other", "gaps"
KINDS = (PARAMETERS, GRADIENTS, STATE, GATHERED, ACTIVATIONS, LOGITS, BATCH, OTHER, GAPS)
"""In the order in which they are shown. Gaps lie between buffers that do not fit together."""

# The first words of the names of a program's arguments.
_ARGUMENTS = {
    f"{lowered.STATE}.params": PARAMETERS,
    f"{lowered.STATE}.opt_state": STATE,
    lowered.BATCH: BATCH,
    lowered.LOADED: STATE,
    lowered.WRITTEN: PARAMETERS,
    lowered.READ: GRADIENTS,
}

Dims = tuple[int, ...]
_POSITIONS = re.compile("wpe|pos")  # whose rows are no vocabulary


@dataclasses.dataclass(frozen=True)
class ParameterShapes:
    """What tells one kind of temporary from another.

    Attributes:
      params: dimensions of parameters, sorted: of the whole and of a device's shard; of stacked
        ones those of a layer too.
      vocabulary: rows of the largest embedding, 0 where none is called so.
    """

    params: frozenset[Dims]
    vocabulary: int

    @classmethod
    def of(cls, plan: Plan) -> ParameterShapes:
        """Of the parameters in a plan."""
        leaves = plan.leaves["params"]
        shapes = [shape for leaf in leaves for shape in (leaf.shape, _shard(leaf, plan.mesh))]
        layers = [shape[1:] for shape in shapes if len(shape) > 2]
        tables = [
            leaf.shape
            for leaf in leaves
            if "embed" in leaf.path and len(leaf.shape) == 2 and not _POSITIONS.search(leaf.path)
        ]
        return cls(frozenset(map(_key, [*shapes, *layers])), max((n for n, _ in tables), default=0))


def attribute(
    text: str, held: Sequence[HeldBuffer], temporary: int, known: ParameterShapes
) -> dict[str, int]:
    """Bytes of a program by kind: its arguments, and what it holds at its peak.

    A gradient and an activation of one shape are told apart by the parameters' shapes alone, so
    that where a parameter has the shape of an activation both count as gradients.

    Args:
      text: of the compiled program.
      held: its temporaries at the peak; where there are none, all of them are "other".
      temporary: bytes of temporaries in all.
      known: of the plan.
    """
    program = parse(text)
    callers, _ = schedules(program)
    found = arguments(program, in_host(text))
    for each in held:
        place = program.computations.get(each.computation)
        known_place = place is not None and each.instruction in place.position
        kind = _kind(program, callers, place, each, known) if place and known_place else OTHER
        found[kind] += each.bytes
    rest = temporary - sum(each.bytes for each in held)
    found[GAPS if held else OTHER] += max(rest, 0)
    return {kind: found[kind] for kind in KINDS if found[kind]}


def arguments(program: HloProgram, hosted: Collection[str]) -> collections.Counter[str]:
    """Bytes of a program's arguments on the device, by kind."""
    found = collections.Counter[str]()
    for each in program.entry.instructions:
        if each.opcode == "parameter" and each.name not in hosted:
            named = (kind for name, kind in _ARGUMENTS.items() if each.op_name.startswith(name))
            found[next(named, OTHER)] += sum(shape.bytes for shape in each.shapes)
    return found


def _kind(
    program: HloProgram,
    callers: Callers,
    place: Computation,
    held: HeldBuffer,
    known: ParameterShapes,
) -> str:
    made = place[held.instruction]
    if made.operation == "all-gather":
        gathered = any(is_argument(program, callers, place, each) for each in made.operands)
        return GATHERED if gathered else ACTIVATIONS
    if made.operation in ("reduce-scatter", "all-reduce"):
        return GRADIENTS
    op_name = made.op_name or _loop_name(callers, place)
    backward = "transpose(" in op_name
    fitting = [i for i, shape in enumerate(made.shapes) if shape.bytes == held.bytes]
    if fitting:
        shape = made.shapes[fitting[0]]
        if _key(shape.dims) in known.params:
            element = fitting[0] if len(made.shapes) > 1 else None
            if is_argument(program, callers, place, made.name, element):
                return PARAMETERS
            if _reformed(place, made):
                return GATHERED
            if backward:
                return GRADIENTS
        if known.vocabulary and known.vocabulary in shape.dims:
            return LOGITS
    return ACTIVATIONS if backward or "jvp(" in op_name else OTHER


def _loop_name(callers: Callers, place: Computation) -> str:
    """Where the loop comes from whose body this is: what it carries has no name of its own."""
    return callers[place.name].loop.op_name if place.name in callers else ""


def _reformed(place: Computation, made: Instruction) -> bool:
    """Whether it takes what was gathered, and nothing else."""
    sources = [place[name] for name in made.operands if name in place.position]
    return len(sources) == 1 and sources[0].operation == "all-gather"


def _shard(leaf: Leaf, mesh: Mesh) -> Dims:
    cut = layout.full(leaf.spec, len(leaf.shape))
    return tuple(-(-n // layout.parts(each, mesh)) for n, each in zip(leaf.shape, cut, strict=True))


def _key(dims: Sequence[int]) -> Dims:
    return tuple(sorted(size for size in dims if size != 1))
