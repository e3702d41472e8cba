"""Partition specs as plain tuples: how they follow a change of layout.

A spec here has exactly one entry a dimension: None, an axis name, or a tuple of several, of which
the first cuts into the largest pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zerojax.xla.jaxprs import param

Spec = tuple[Any, ...]


def full(spec: PartitionSpec | Sequence[Any] | None, ndim: int) -> Spec:
    """``spec`` with one entry for each of ``ndim`` dimensions."""
    entries = tuple(_entry(axes(entry)) for entry in spec or ())
    return (*entries, *(None,) * (ndim - len(entries)))


def axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names; none where it leaves them to XLA."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(names: tuple[str, ...]) -> Any:
    """The entry that names these axes."""
    return names if len(names) > 1 else names[0] if names else None


def without(spec: Sequence[Any], axis: str) -> Spec:
    """``spec`` after an all-gather over ``axis``."""
    return tuple(_entry(tuple(a for a in axes(entry) if a != axis)) for entry in spec)


def only(spec: Sequence[Any], names: Collection[str]) -> Spec:
    """``spec`` with these axes alone."""
    return tuple(_entry(tuple(a for a in axes(entry) if a in names)) for entry in spec)


def within(spec: Sequence[Any], dimension: int, axis: str) -> Spec:
    """``spec`` with the pieces of one dimension cut over ``axis``."""
    return tuple(
        _entry((*axes(entry), axis)) if d == dimension else entry for d, entry in enumerate(spec)
    )


def cutting(spec: Sequence[Any], mesh: Mesh | AbstractMesh) -> Spec:
    """``spec`` with those axes alone that cut something, which one of size 1 does not."""
    return only(spec, [name for name, size in mesh.shape.items() if size > 1])


def parts(entry: Any, mesh: Mesh) -> int:
    """Into how many pieces one entry of a spec cuts its dimension."""
    return math.prod(mesh.shape[a] for a in axes(entry))


def piece(shape: Sequence[int], spec: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """The shape of one device's piece, of the largest where they differ."""
    return tuple(-(-n // parts(entry, mesh)) for n, entry in zip(shape, spec, strict=True))


def _transpose(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(spec[i] for i in param(eqn, "permutation"))


def _squeeze(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(s for i, s in enumerate(spec) if i not in param(eqn, "dimensions"))


def _broadcast(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    if math.prod(param(eqn, "shape")) != math.prod(eqn.invars[0].aval.shape):
        return None  # a true broadcast uses the parameter
    out: list[Any] = [None] * len(param(eqn, "shape"))
    for source, target in enumerate(param(eqn, "broadcast_dimensions")):
        out[target] = spec[source]
    return tuple(out)


def _reshape(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, spec, mesh)


def _reshaped(old: Sequence[int], new: Sequence[int], spec: Spec, mesh: Mesh) -> Spec | None:
    out: list[Any] = [None] * len(new)
    for i, entry in enumerate(spec):
        if entry is None:
            continue
        # The cut survives where it lies on the outermost part of a merged or split dimension.
        before = math.prod(old[:i])
        j = next((j for j, n in enumerate(new) if n > 1 and math.prod(new[:j]) == before), None)
        if j is None or new[j] % parts(entry, mesh):
            return None
        out[j] = entry
    return tuple(out)


def _untranspose(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    out: list[Any] = [None] * len(spec)
    for target, source in enumerate(param(eqn, "permutation")):
        out[source] = spec[target]
    return tuple(out)


def _unreshape(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, spec, mesh)


def side_by_side(eqn: Any, specs: Sequence[Spec | None]) -> bool:
    """Whether a concatenation puts arrays cut alike beside each other, each device its own parts:
    along a dimension that is not cut."""
    first, at = specs[0], param(eqn, "dimension")
    return first is not None and first[at] is None and all(spec == first for spec in specs)


_Map = Callable[[Any, Spec, Mesh], Spec | None]

# From an operand's spec to the result's, None where the cut does not survive.
MAPS: Mapping[str, _Map] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}

# From a result's spec to the operand's.
INVERSES: Mapping[str, _Map] = {
    "transpose": _untranspose,
    "reshape": _unreshape,
    "squeeze": _unreshape,
}
