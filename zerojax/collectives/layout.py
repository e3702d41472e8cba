"""Partition specs as plain tuples: how they follow a change of layout.

A spec here has exactly one entry a dimension: None, an axis name, or a tuple of axis names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

Spec = tuple[Any, ...]


def full(spec: PartitionSpec | Sequence[Any] | None, ndim: int) -> Spec:
    """``spec`` with one entry for each of ``ndim`` dimensions."""
    entries = tuple(spec or ())
    return (*entries, *(None,) * (ndim - len(entries)))


def axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def without(spec: Sequence[Any], axis: str) -> Spec:
    """``spec`` after an all-gather over ``axis``."""
    return tuple(
        None
        if entry == axis
        else entry
        if isinstance(entry, str | None)
        else tuple(a for a in entry if a != axis) or None
        for entry in spec
    )


def parts(entry: Any, mesh: Mesh) -> int:
    """Into how many pieces one entry of a spec cuts its dimension."""
    return math.prod(mesh.shape[a] for a in axes(entry))


def _transpose(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(spec[i] for i in eqn.params["permutation"])


def _squeeze(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return tuple(s for i, s in enumerate(spec) if i not in eqn.params["dimensions"])


def _broadcast(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    if math.prod(eqn.params["shape"]) != math.prod(eqn.invars[0].aval.shape):
        return None  # a true broadcast uses the parameter
    out: list[Any] = [None] * len(eqn.params["shape"])
    for source, target in enumerate(eqn.params["broadcast_dimensions"]):
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
    for target, source in enumerate(eqn.params["permutation"]):
        out[source] = spec[target]
    return tuple(out)


def _unreshape(eqn: Any, spec: Spec, mesh: Mesh) -> Spec | None:
    return _reshaped(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, spec, mesh)


def side_by_side(eqn: Any, specs: Sequence[Spec | None]) -> bool:
    """Whether a concatenation puts arrays cut alike beside each other, each device its own parts:
    along a dimension that is not cut."""
    first, at = specs[0], eqn.params["dimension"]
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
