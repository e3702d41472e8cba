"""Propagation of specs through equations that move elements and compute no new ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from zerojax.graph.contractions import Contraction
from zerojax.graph.dimensions import Name, names_of
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import LABELS, SLICES
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Atom, Equation


def _named(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    """Returns the spec by the names of the dimensions, of the first operand and of the result."""
    names = names_of(eqn) or ()
    return _by_name(spec, names[0], names[-1])


def _unnamed(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    names = names_of(eqn) or ()
    return _by_name(spec, names[-1], names[0])


def _by_name(spec: Spec, one: Sequence[Name], other: Sequence[Name]) -> Spec | None:
    """Returns the spec of an array with the names ``other``; None if it lacks a dimension that the
    spec shards."""
    entries = {name: entry for name, entry in zip(one, spec, strict=True) if entry is not None}
    is_known = None not in entries and entries.keys() <= {*other}
    return tuple(entries.get(name) for name in other) if is_known else None


def _broadcast(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    # A true broadcast uses the parameter.
    is_same_size = eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return _named(eqn, spec, mesh) if is_same_size else None


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


def _unreshape(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, spec, mesh)


def _lookup(eqn: Equation, spec: Spec, mesh: Mesh) -> Spec | None:
    """Returns the spec of the one entry that a gather takes from an array, such as ``jnp.take`` of
    a layer, or that a scatter adds to it, from the array's spec."""
    lookup = Lookup.of(eqn)
    complete = [d in lookup.complete for d in range(len(spec))]
    if lookup.by_index or _where_complete(spec, complete) is None:
        return None
    return tuple(spec[d] for d in lookup.window)


def _same_sizes(one: Atom, other: Atom) -> list[bool]:
    """Returns for each dimension of two arrays whether it has one size in both."""
    return [n == m for n, m in zip(one.aval.shape, other.aval.shape, strict=True)]


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
    product = Contraction.of(eqn)
    if product is None or eqn.outvars[0].aval.shape:
        return False
    left, right = product.contracted
    return tuple(left) == tuple(right)


_Rule = Callable[[Equation, Spec, Mesh], Spec | None]

FORWARD: Mapping[str, _Rule] = {
    "transpose": _named,
    "squeeze": _named,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}
"""By primitive: the function from the spec of its operand to that of its result; None if elements
would move between devices."""

TAKES: Mapping[str, _Rule] = {
    "slice": _named,
    "dynamic_slice": _named,
    "gather": _lookup,
}
"""Forward rules of primitives whose result is a part of their first operand: a layer of a stack."""

BACKWARD: Mapping[str, _Rule] = {
    "transpose": _unnamed,
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
    elif name in SLICES | {"pad"}:
        operand_spec = _unnamed(eqn, spec, mesh)
    elif name == "scatter-add":
        entry_spec = _lookup(eqn, spec, mesh)
        return {} if entry_spec is None else {0: spec, 2: entry_spec}
    elif name == "dynamic_update_slice":
        operand_spec = _where_complete(spec, _same_sizes(eqn.invars[1], eqn.invars[0]))
        return {} if operand_spec is None else {0: operand_spec, 1: operand_spec}
    elif name == "concatenate" and spec[param(eqn, "dimension")] is None:
        return dict.fromkeys(range(len(eqn.invars)), spec)
    else:
        operand_spec = None
    return {} if operand_spec is None else {0: operand_spec}
