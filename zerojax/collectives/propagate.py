"""Propagation of specs through equations that move elements and compute no new ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from zerojax.graph.primitives import LABELS, SLICES
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation


def _transpose(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(spec[i] for i in param(eqn, "permutation"))


def _squeeze(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(s for i, s in enumerate(spec) if i not in param(eqn, "dimensions"))


def _broadcast(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    if math.prod(param(eqn, "shape")) != math.prod(eqn.invars[0].aval.shape):
        return None  # a true broadcast uses the parameter
    out: list[SpecEntry] = [None] * len(param(eqn, "shape"))
    for source, target in enumerate(param(eqn, "broadcast_dimensions")):
        out[target] = spec[source]
    return tuple(out)


def _reshape(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, spec, mesh)


def _reshaped(old: Sequence[int], new: Sequence[int], spec: Spec, mesh: Mesh) -> Spec | None:
    """Returns the spec after a reshape from shape ``old`` to ``new``; None if elements would move
    between devices."""
    out: list[SpecEntry] = [None] * len(new)
    for i, entry in enumerate(spec):
        if entry is None:
            continue
        # Shards map to shards along the outermost factor of a merged or split dimension.
        before = math.prod(old[:i])
        j = next((j for j, n in enumerate(new) if n > 1 and math.prod(new[:j]) == before), None)
        k = layout.parts(entry, mesh)
        if j is None or (old[i] != new[j] and (old[i] % k or new[j] % k)):
            return None
        out[j] = entry
    return tuple(out)


def _untranspose(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    out: list[SpecEntry] = [None] * len(spec)
    for target, source in enumerate(param(eqn, "permutation")):
        out[source] = spec[target]
    return tuple(out)


def _unreshape(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, spec, mesh)


def _slice(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    shape = eqn.invars[0].aval.shape
    strides = param(eqn, "strides") or (1,) * len(shape)
    taken = zip(param(eqn, "start_indices"), param(eqn, "limit_indices"), strides, strict=True)
    complete = [each == (0, n, 1) for each, n in zip(taken, shape, strict=True)]
    return _where_complete(spec, complete)


def _dynamic_slice(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    sizes = zip(param(eqn, "slice_sizes"), eqn.invars[0].aval.shape, strict=True)
    return _where_complete(spec, [taken == n for taken, n in sizes])


def _gather(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    """The rule of a gather of one entry along some dimensions, such as ``jnp.take`` of a layer."""
    (stack, indices), (out,) = (v.aval for v in eqn.invars), (v.aval for v in eqn.outvars)
    numbers = param(eqn, "dimension_numbers")
    if math.prod(indices.shape[:-1]) != 1 or out.ndim != len(numbers.offset_dims):
        return None
    sizes = zip(param(eqn, "slice_sizes"), stack.shape, strict=True)
    complete = [taken == n for taken, n in sizes]
    picked = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if _where_complete(spec, [full and d not in picked for d, full in enumerate(complete)]) is None:
        return None
    return tuple(entry for d, entry in enumerate(spec) if d not in picked)


def _scattered(eqn: Equation, spec: Spec) -> Spec | None:
    """Returns the spec of the one entry that a scatter adds to an array, from the array's spec."""
    stack, indices, entry = (v.aval for v in eqn.invars)
    numbers = param(eqn, "dimension_numbers")
    if math.prod(indices.shape[:-1]) != 1 or entry.ndim != len(numbers.update_window_dims):
        return None
    picked = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(stack.ndim) if d not in picked]
    sizes = dict(zip(window, entry.shape, strict=True))
    if _where_complete(spec, [sizes.get(d) == n for d, n in enumerate(stack.shape)]) is None:
        return None
    return tuple(spec[d] for d in window)


def _where_complete(spec: Spec, complete: Sequence[bool]) -> Spec | None:
    """Returns the spec if each dimension that it shards is complete in operand and result, else
    None."""
    pairs = zip(spec, complete, strict=True)
    return spec if all(entry is None or is_complete for entry, is_complete in pairs) else None


def side_by_side(eqn: Equation, specs: Sequence[Spec | None]) -> bool:
    """Returns whether each device can concatenate its own shards: all arrays have the same spec,
    which does not shard the dimension of the concatenation."""
    first, at = specs[0], param(eqn, "dimension")
    return first is not None and first[at] is None and all(spec == first for spec in specs)


def adds_up(eqn: Equation) -> bool:
    """Returns whether an equation is the dot product of two arrays of one shape: each device
    multiplies its own shards."""
    if eqn.primitive.name != "dot_general" or eqn.outvars[0].aval.shape:
        return False
    (left, right), _ = param(eqn, "dimension_numbers")
    return tuple(left) == tuple(right)


_Rule = Callable[[Equation, Spec, Mesh], Spec | None]

FORWARD: Mapping[str, _Rule] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}
"""By primitive: the function from the spec of its operand to that of its result; None if elements
would move between devices."""

TAKES: Mapping[str, _Rule] = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}
"""Forward rules of primitives whose result is a part of their first operand: a layer of a stack."""

BACKWARD: Mapping[str, _Rule] = {
    "transpose": _untranspose,
    "reshape": _unreshape,
    "squeeze": _unreshape,
    "reduce_sum": _unreshape,  # of a dimension of size 1, along which a parameter was broadcast
}
"""By primitive: the function from the spec of its result to that of its operand, which has as many
elements."""


def forward(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    """Returns the spec of an equation's result from that of its operand; None if elements would
    move between devices, or if the primitive has no forward rule."""
    rule = FORWARD.get(eqn.primitive.name) or TAKES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, spec, mesh)


def moves(name: str) -> bool:
    """Returns whether a primitive has one operand and keeps its elements unchanged."""
    return name in FORWARD or name in LABELS


def follows(eqn: Equation) -> bool:
    """Returns whether an equation's result consists of elements of its first operand, in any
    order."""
    return moves(eqn.primitive.name) or eqn.primitive.name in TAKES


def reversible(eqn: Equation) -> bool:
    """Returns whether an equation moves the elements of one operand and has a backward rule."""
    name = eqn.primitive.name
    return name in BACKWARD and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def backward(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    """Returns the spec of an equation's operand from that of its result; None if elements would
    move between devices, or if the equation is not :func:`reversible`."""
    return BACKWARD[eqn.primitive.name](eqn, spec, mesh) if reversible(eqn) else None


def operand_specs(eqn: Equation, spec: Spec, mesh: Mesh) -> dict[int, Spec]:
    """Returns, by position, the specs of the operands that supply the elements of an equation's
    result, from the spec of the result. Empty if elements would move between devices, or for other
    equations.

    The gradient of a layer that was taken from a stack is padded to the stack's shape, or written
    into zeros of that shape; in both cases the layer keeps its sharding.
    """
    name = eqn.primitive.name
    if reversible(eqn):
        operand_spec = backward(eqn, spec, mesh)
    elif name == "broadcast_in_dim" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
        operand_spec = tuple(spec[d] for d in param(eqn, "broadcast_dimensions"))
    elif name == "pad":
        operand_spec = _where_complete(
            spec, [not any(each) for each in param(eqn, "padding_config")]
        )
    elif name in SLICES:
        operand_spec = TAKES[name](eqn, spec, mesh)
    elif name == "scatter-add":
        entry_spec = _scattered(eqn, spec)
        return {} if entry_spec is None else {0: spec, 2: entry_spec}
    elif name == "dynamic_update_slice":
        sizes = zip(eqn.invars[1].aval.shape, eqn.invars[0].aval.shape, strict=True)
        operand_spec = _where_complete(spec, [written == n for written, n in sizes])
        return {} if operand_spec is None else {0: operand_spec, 1: operand_spec}
    elif name == "concatenate" and spec[param(eqn, "dimension")] is None:
        return dict.fromkeys(range(len(eqn.invars)), spec)
    else:
        operand_spec = None
    return {} if operand_spec is None else {0: operand_spec}
