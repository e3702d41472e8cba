"""Partition specs as plain tuples, and functions on them.

A spec in this module has exactly one entry a dimension: None, an axis name, or a tuple of several
names, of which the first is the outermost and splits the dimension into the largest slices.

If an axis divides no dimension of an array, several dimensions may share the axis by its factors.
A part of an axis is named as in Shardy: ``"data:(64)16"`` has size 16 after a part of size 64, so
that ``"data"`` of 1024 devices is ``"data:(1)64"`` and ``"data:(64)16"``.

Mesh axes that ZeRO treats as one are joined by name: ``"data+seq"``. A part of a joined axis may
span both, and :func:`sharding` replaces the joined name by the axes of the mesh.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from zerojax.devices.mesh import axis_size, joined_axes

SpecEntry: TypeAlias = str | Sequence[str] | None
"""The mesh axes of one dimension in a spec."""

Spec: TypeAlias = tuple[SpecEntry, ...]
AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


class LeafSpec(tuple[SpecEntry, ...]):
    """A spec that has the paths of the leaves of the state whose arrays, or whose gradients, it
    shards. It equals a spec without paths.

    Attributes:
      leaves: The paths.
    """

    leaves: tuple[str, ...]

    def __new__(cls, spec: Iterable[SpecEntry], *leaves: str) -> LeafSpec:
        new = super().__new__(cls, spec)
        new.leaves = leaves
        return new


def with_leaves(spec: Spec, *others: object) -> Spec:
    """Returns ``spec`` with the leaves of other specs, as far as they are known."""
    leaves = dict.fromkeys(leaf for other in others for leaf in getattr(other, "leaves", ()))
    return LeafSpec(spec, *leaves) if leaves else spec


class SubAxis(NamedTuple):
    """A part of a mesh axis.

    Attributes:
      axis: The name of the full axis.
      before: The product of the sizes of the parts before this one.
      size: The size of this part.
    """

    axis: str
    before: int
    size: int

    @property
    def name(self) -> str:
        """The name of the part in a spec, such as ``"data:(64)16"``."""
        return f"{self.axis}:({self.before}){self.size}"

    @classmethod
    def of(cls, name: str) -> SubAxis | None:
        """Parses the name of a part; returns None for the name of a full axis."""
        match = re.fullmatch(r"(.*):\((\d+)\)(\d+)", name)
        return cls(match[1], int(match[2]), int(match[3])) if match else None


def full_axis(name: str) -> str:
    """Returns the axis that a name stands for, in full or in part."""
    part = SubAxis.of(name)
    return name if part is None else part.axis


def before(name: str) -> int:
    """Returns the product of the sizes before a part in its axis; 0 for a full axis."""
    part = SubAxis.of(name)
    return 0 if part is None else part.before


def full(spec: PartitionSpec | Sequence[SpecEntry] | None, ndim: int) -> Spec:
    """Returns ``spec`` with one entry for each of ``ndim`` dimensions."""
    entries = tuple(_entry(axes(entry)) for entry in spec or ())
    return (*entries, *(None,) * (ndim - len(entries)))


def axes(entry: SpecEntry) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names; none if the entry is left to XLA."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(names: tuple[str, ...]) -> SpecEntry:
    """Returns the entry that names these axes."""
    return names if len(names) > 1 else names[0] if names else None


def without(spec: Sequence[SpecEntry], axis: str) -> Spec:
    """Returns ``spec`` after an all-gather over ``axis``, or over the axes that it joins."""
    gone = {axis, *joined_axes(axis)}
    return tuple(
        _entry(tuple(a for a in axes(entry) if full_axis(a) not in gone)) for entry in spec
    )


def inside(spec: Sequence[SpecEntry], axis: str, least: int) -> Spec:
    """Returns ``spec`` after an all-gather over the outer parts of ``axis``: the parts after a
    product of sizes below ``least``."""

    def stays(name: str) -> bool:
        part = SubAxis.of(name)
        return part is None or part.axis != axis or part.before >= least

    return tuple(_entry(tuple(filter(stays, axes(entry)))) for entry in spec)


def only(spec: Sequence[SpecEntry], names: Collection[str]) -> Spec:
    """Returns ``spec`` with only these axes."""
    return tuple(_entry(tuple(a for a in axes(entry) if full_axis(a) in names)) for entry in spec)


def within(spec: Sequence[SpecEntry], dimension: int, axis: str) -> Spec:
    """Returns ``spec`` with the slices of one dimension sharded further over ``axis``."""
    return tuple(
        _entry((*axes(entry), axis)) if d == dimension else entry for d, entry in enumerate(spec)
    )


def cutting(spec: Sequence[SpecEntry], mesh: Mesh | AbstractMesh) -> Spec:
    """Returns ``spec`` without the axes of size 1, which shard nothing."""
    return only(spec, [full_axis(name) for name, size in mesh.shape.items() if size > 1])


def dimensions(spec: Sequence[SpecEntry], axis: str) -> list[int]:
    """Returns the dimensions that ``axis`` or parts of the axis shard."""
    return [d for d, entry in enumerate(spec) if axis in map(full_axis, axes(entry))]


def parts_of(spec: Sequence[SpecEntry], axis: str) -> list[tuple[int, str]]:
    """Returns a pair (dimension, name) for ``axis`` or each part of the axis, innermost first."""
    named = [(d, a) for d, entry in enumerate(spec) for a in axes(entry) if full_axis(a) == axis]
    return sorted(named, key=lambda pair: -before(pair[1]))


def parts(entry: SpecEntry, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of slices into which one entry of a spec splits its dimension."""
    named = ((SubAxis.of(a), a) for a in axes(entry))
    return math.prod(axis_size(mesh, a) if part is None else part.size for part, a in named)


def shard_shape(
    shape: Sequence[int], spec: Sequence[SpecEntry], mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Returns the shape of one device's shard; of the largest if shards differ."""
    return tuple(-(-n // parts(entry, mesh)) for n, entry in zip(shape, spec, strict=True))


def padded_shape(
    shape: Sequence[int], spec: Sequence[SpecEntry], mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Returns the shape with each dimension padded to a multiple of its number of slices."""
    local = shard_shape(shape, spec, mesh)
    return tuple(n * parts(entry, mesh) for n, entry in zip(local, spec, strict=True))


def separate(spec: Iterable[SpecEntry], mesh: Mesh | AbstractMesh) -> Spec:
    """Replaces joined axes in ``spec`` by the axes of the mesh.

    Example:
      >>> mesh = AbstractMesh((4, 2), ("data", "seq"))
      >>> separate(("data+seq", None), mesh), separate(("data+seq:(1)2", "data+seq:(2)4"), mesh)
      ((('data', 'seq'), None), ('data:(1)2', ('data:(2)2', 'seq')))
    """
    return tuple(
        _entry(tuple(name for a in axes(entry) for name in _separate(a, mesh)))
        if any(len(joined_axes(full_axis(a))) > 1 for a in axes(entry))
        else entry
        for entry in spec
    )


def _separate(name: str, mesh: Mesh | AbstractMesh) -> Iterator[str]:
    members, part = joined_axes(full_axis(name)), SubAxis.of(name)
    if len(members) == 1:
        yield name
        return
    start, end = (
        (1, axis_size(mesh, name)) if part is None else (part.before, part.before * part.size)
    )
    outer = 1
    for member in members:
        inner = outer * mesh.shape[member]
        first, last = max(start, outer), min(end, inner)
        if (first, last) == (outer, inner) and inner > outer:
            yield member
        elif first < last:
            yield SubAxis(member, first // outer, last // first).name
        outer = inner


def separable(spec: Iterable[SpecEntry], mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether every part of a joined axis in ``spec`` consists of parts of its members."""
    for part in (SubAxis.of(a) for entry in spec for a in axes(entry)):
        if part is None:
            continue
        outer = 1
        for member in joined_axes(part.axis):
            outer *= mesh.shape[member]
            for edge in (part.before, part.before * part.size):
                if edge % outer and outer % edge:
                    return False
    return True


def join_axes(spec: Sequence[SpecEntry], axis: str, mesh: Mesh | AbstractMesh) -> Spec:
    """Replaces mesh axes in ``spec`` by the joined ``axis``, in entries that end with all of its
    members of more than one device."""
    members = tuple(name for name in joined_axes(axis) if mesh.shape[name] > 1)
    if len(joined_axes(axis)) == 1:
        return tuple(spec)
    return tuple(
        _entry((*axes(entry)[: -len(members)], axis))
        if axes(entry)[-len(members) :] == members
        else entry
        for entry in spec
    )


def divide_axes(mesh: AnyMesh, spec: Iterable[SpecEntry]) -> AnyMesh:
    """Returns ``mesh`` with its axes divided into the parts that ``spec`` names; the mesh itself if
    ``spec`` names only full axes."""
    named = (SubAxis.of(a) for entry in spec for a in axes(entry))
    found = frozenset(part for part in named if part is not None and part.name not in mesh.shape)
    return _divided(mesh, found) if found else mesh


@functools.cache
def _divided(mesh: AnyMesh, found: frozenset[SubAxis]) -> AnyMesh:
    names: list[str] = []
    sizes: list[int] = []
    for axis, size in mesh.shape.items():
        cuts = {1, size}
        for part in found:
            cuts |= {part.before, part.before * part.size} if part.axis == axis else set()
        for before, after in itertools.pairwise(sorted(cuts)):
            names.append(axis if len(cuts) == 2 else SubAxis(axis, before, after // before).name)
            sizes.append(after // before)
        if size == 1:
            names.append(axis)
            sizes.append(1)
    kinds = (mesh.axis_types[0],) * len(names)
    result: Any = (
        Mesh(np.reshape(mesh.devices, sizes), names, axis_types=kinds)
        if isinstance(mesh, Mesh)
        else AbstractMesh(tuple(sizes), tuple(names), axis_types=kinds)
    )
    return result  # type: ignore[no-any-return]


def merge_axes(mesh: Mesh) -> Mesh:
    """Returns ``mesh`` with the parts of its axes merged into full axes."""
    names = [*dict.fromkeys(map(full_axis, mesh.axis_names))]
    if len(names) == len(mesh.axis_names):
        return mesh
    sizes = dict.fromkeys(names, 1)
    for name, size in mesh.shape.items():
        sizes[full_axis(name)] *= size
    return Mesh(np.reshape(mesh.devices, [*sizes.values()]), names)


def is_divided(sharding: Sharding) -> bool:
    """Returns whether the mesh of a sharding is divided into parts of axes."""
    return isinstance(sharding, NamedSharding) and any(map(SubAxis.of, sharding.mesh.axis_names))


def on_full_axes(mesh: Mesh, spec: Iterable[SpecEntry], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array on the undivided mesh, after an all-gather over incomplete
    axes and over axes that do not divide their dimension."""
    full_mesh = merge_axes(mesh)
    entries = [
        _dividing(size, _full_axes(axes(entry), full_mesh), full_mesh)
        for size, entry in zip(shape, full(tuple(spec), len(shape)), strict=True)
    ]
    return NamedSharding(full_mesh, PartitionSpec(*entries))


def _full_axes(names: Sequence[str], mesh: Mesh) -> list[str]:
    """Returns the axes of ``mesh`` of which ``names`` has all parts."""
    sizes: dict[str, int] = {}
    for name in names:
        part = SubAxis.of(name)
        axis, size = (name, mesh.shape[name]) if part is None else (part.axis, part.size)
        sizes[axis] = sizes.get(axis, 1) * size
    return [axis for axis, size in sizes.items() if size == mesh.shape[axis]]


def _dividing(size: int, names: Sequence[str], mesh: Mesh) -> SpecEntry:
    """Returns the entry of those axes among ``names`` that divide a dimension."""
    kept: tuple[str, ...] = ()
    for name in names:
        if size % parts((*kept, name), mesh) == 0:
            kept = (*kept, name)
    return _entry(kept)


def sharding(
    mesh: Mesh | AbstractMesh, spec: Iterable[SpecEntry], memory_kind: str | None = None
) -> NamedSharding:
    """Returns ``spec`` as a sharding on ``mesh``, divided where ``spec`` names parts of axes."""
    spec = separate(spec, mesh)
    divided_mesh: Any = divide_axes(mesh, spec)
    return NamedSharding(divided_mesh, PartitionSpec(*spec), memory_kind=memory_kind)
