"""The bytes of a compiled step by kind: parameters, gradients, activations, ..."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from zerojax.hlo.assignment import HeldBuffer
from zerojax.hlo.program import Computation, HloProgram, parse
from zerojax.hlo.provenance import is_argument
from zerojax.plan.state_sharding import Leaf, Plan, layout
from zerojax.xla import lowered

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
EXTRA = "extra state"
GATHERED, ACTIVATIONS, LOGITS = "gathered parameters", "activations", "logits"
BATCH, OTHER, GAPS = "batch", "other", "gaps"
KINDS = (PARAMETERS, GRADIENTS, STATE, EXTRA, GATHERED, ACTIVATIONS, LOGITS, BATCH, OTHER, GAPS)
"""All kinds in display order. Gaps are unused bytes between buffers that do not fit together."""

# Prefixes of the names of a program's arguments.
_ARGUMENTS = {
    f"{lowered.STATE}.params": PARAMETERS,
    f"{lowered.STATE}.opt_state": STATE,
    f"{lowered.STATE}.rest": EXTRA,
    lowered.BATCH: BATCH,
    lowered.LOADED: STATE,
    lowered.WRITTEN: PARAMETERS,
    lowered.READ: GRADIENTS,
}

Dims = tuple[int, ...]
_POSITIONS = re.compile("wpe|pos")  # embeddings whose rows are positions, not a vocabulary


@dataclasses.dataclass(frozen=True)
class ParameterShapes:
    """Shapes that distinguish one kind of temporary from another.

    Attributes:
      params: Sorted dimensions of the parameters, unsharded, of a device's shard, and of the shard
        that ZeRO's axis leaves; also of one layer, for parameters stacked by layer.
      vocabulary: Rows of the largest embedding; 0 if no parameter's path contains "embed".
    """

    params: frozenset[Dims]
    vocabulary: int

    @classmethod
    def of(cls, plan: Plan) -> ParameterShapes:
        """Returns the shapes of the parameters in a plan."""
        leaves = plan.leaves["params"]
        shapes = [shape for leaf in leaves for shape in (leaf.shape, *_shards(leaf, plan))]
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
    """Returns the bytes of a program by kind: its arguments, and its temporaries at the peak.

    Only the parameters' shapes distinguish a gradient from an activation in the backward pass:
    activations with the shape of a parameter count as gradients.

    Args:
      text: The compiled program's text.
      held: Its temporary buffers at the peak; if empty, all temporaries count as "other".
      temporary: Total bytes of temporaries.
      known: The shapes of the parameters.
    """
    program = parse(text)
    kinds = arguments(program)
    for each in held:
        computation = program.computations.get(each.computation)
        kind = OTHER
        if computation is not None and each.instruction in computation.position:
            kind = _kind(program, computation, each, known)
        kinds[kind] += each.bytes
    remaining = temporary - sum(each.bytes for each in held)
    kinds[GAPS if held else OTHER] += max(remaining, 0)
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def arguments(program: HloProgram) -> collections.Counter[str]:
    """Returns the bytes of a program's arguments on the device, by kind."""
    sizes = collections.Counter[str]()
    for each in program.entry.instructions:
        if each.opcode == "parameter" and not each.in_host:
            kinds = (kind for name, kind in _ARGUMENTS.items() if each.op_name.startswith(name))
            sizes[next(kinds, OTHER)] += each.bytes
    return sizes


def _kind(
    program: HloProgram,
    computation: Computation,
    held: HeldBuffer,
    known: ParameterShapes,
) -> str:
    instruction = computation[held.instruction]
    if instruction.operation == "all-gather":
        is_parameter = any(
            is_argument(program, computation, each, gathered=True) for each in instruction.operands
        )
        return GATHERED if is_parameter else ACTIVATIONS
    if instruction.operation in ("reduce-scatter", "all-reduce"):
        return GRADIENTS
    # Arrays that a loop carries have no name: they take the loop's.
    caller = program.callers.get(computation.name)
    loop_name = caller.loop.op_name if caller else ""
    op_name = instruction.op_name or loop_name
    is_backward = "transpose(" in op_name
    matches = [i for i, shape in enumerate(instruction.shapes) if shape.bytes == held.bytes]
    if matches:
        shape = instruction.shapes[matches[0]]
        if _key(shape.dims) in known.params:
            element = matches[0] if len(instruction.shapes) > 1 else None
            if is_argument(program, computation, instruction.name, element):
                return PARAMETERS
            sources = [computation[x] for x in instruction.operands if x in computation.position]
            if [source.operation for source in sources] == ["all-gather"]:
                return GATHERED
            if is_backward:
                return GRADIENTS
        if known.vocabulary and known.vocabulary in shape.dims:
            return LOGITS
    return ACTIVATIONS if is_backward or "jvp(" in op_name else OTHER


def _shards(leaf: Leaf, plan: Plan) -> Iterator[Dims]:
    """Yields the shape of a device's shard, and that after an all-gather over ZeRO's axis."""
    spec = leaf.full_spec
    for each in (spec, layout.without(spec, plan.axis)):
        yield layout.shard_shape(leaf.shape, each, plan.mesh)


def _key(dims: Sequence[int]) -> Dims:
    return tuple(sorted(size for size in dims if size != 1))
