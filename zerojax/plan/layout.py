"""Partition specs as plain tuples, and what can be asked of them.

A spec here has exactly one entry a dimension: None, an axis name, or a tuple of several, of which
the first cuts into the largest pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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
    """``spec`` with the pieces of one dimension sharded over ``axis``."""
    return tuple(
        _entry((*axes(entry), axis)) if d == dimension else entry for d, entry in enumerate(spec)
    )


def cutting(spec: Sequence[Any], mesh: Mesh | AbstractMesh) -> Spec:
    """``spec`` with those axes alone that shard something, which one of size 1 does not."""
    return only(spec, [name for name, size in mesh.shape.items() if size > 1])


def parts(entry: Any, mesh: Mesh) -> int:
    """Into how many pieces one entry of a spec cuts its dimension."""
    return math.prod(mesh.shape[a] for a in axes(entry))


def piece(shape: Sequence[int], spec: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """The shape of one device's piece, of the largest where they differ."""
    return tuple(-(-n // parts(entry, mesh)) for n, entry in zip(shape, spec, strict=True))
