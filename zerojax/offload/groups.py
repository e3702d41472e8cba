"""Sub-groups: the pieces of the state that stream through the device together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from zerojax.offload.separate import Cluster
from zerojax.plan import layout

LARGEST = 2**25
"""Elements of a sub-group at most: its state passes through the device, 12 bytes an element under
Adam, and DeepSpeed's default of 1e9 elements would not fit."""


@dataclass(frozen=True)
class ArrayPlacement:
    """How one array of the update lies.

    Attributes:
      shape, dtype: of the whole array.
      spec: its PartitionSpec.
      place: see :mod:`zerojax.plan.places`.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    place: str

    def local(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one device's shard."""
        entries = layout.full(self.spec, len(self.shape))
        return tuple(
            size // layout.parts(e, mesh) for size, e in zip(self.shape, entries, strict=True)
        )

    def rows(self, mesh: Mesh) -> tuple[int, ...]:
        """The shard as rows: all dimensions but the last merged into one."""
        local = self.local(mesh)
        return local if len(local) < 2 else (math.prod(local[:-1]), local[-1])

    def axes(self) -> tuple[str, ...]:
        """The mesh axes that cut it."""
        return tuple(a for entry in self.spec for a in layout.axes(entry))


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``start + count`` of each shard of a cluster's arrays; a ``count`` of None
    is all of it."""

    cluster: Cluster
    start: int
    count: int | None


Group = tuple[Piece, ...]


def goes_whole(group: Group) -> bool:
    """Whether it is a cluster that passes through the device as a whole, not cut into rows."""
    return any(p.count is None for p in group)


def groups(
    clusters: Sequence[Cluster], lying: Sequence[ArrayPlacement], mesh: Mesh, largest: int
) -> list[Group]:
    """Packs clusters into sub-groups, those alike next to each other.

    A sub-group passes through the device in two halves, of which three are there at a time: one
    coming, one in work, one going. So a group here is half of ``largest`` elements a device.

    Args:
      clusters: of the update.
      lying: each argument of the update.
      mesh: the devices.
      largest: elements of a sub-group, on each device.
    """
    half = _half(largest)
    found: list[Group] = []
    open_: list[Piece] = []
    left = half
    for piece, size in _pieces(clusters, lying, mesh, half):
        alone = piece.count is None
        again = any(piece.cluster is other.cluster for other in open_)
        if open_ and (alone or again or size > left):
            found.append(tuple(open_))
            open_, left = [], half
        open_.append(piece)
        left = 0 if alone else left - size
    return [*found, tuple(open_)] if open_ else found


def _pieces(
    clusters: Sequence[Cluster], lying: Sequence[ArrayPlacement], mesh: Mesh, half: int
) -> Iterator[tuple[Piece, int]]:
    for cluster in sorted(clusters, key=lambda c: (not c.elementwise, c.key)):
        arrays = [lying[i] for i in cluster.inputs]
        if not cluster.elementwise or len({a.spec for a in arrays}) > 1:
            yield Piece(cluster, 0, None), half
            continue
        width = math.prod(arrays[0].rows(mesh)[1:])
        for start, stop in _cut(arrays[0], mesh, half):
            yield Piece(cluster, start, stop - start), (stop - start) * width


def cuts(lying: ArrayPlacement, mesh: Mesh, largest: int) -> list[tuple[int, int]]:
    """Where an array's shards are cut into pieces: ``(start, stop)``, in elements."""
    width = math.prod(lying.rows(mesh)[1:])
    return [(a * width, b * width) for a, b in _cut(lying, mesh, _half(largest))]


def _cut(lying: ArrayPlacement, mesh: Mesh, half: int) -> Iterator[tuple[int, int]]:
    """The same in rows."""
    shape = lying.rows(mesh)
    count = _even(shape[0], max(1, half // math.prod(shape[1:])))
    for start in range(0, shape[0], count):
        yield start, min(start + count, shape[0])


def _half(largest: int) -> int:
    return max(1, min(largest, LARGEST) // 2)


def _even(rows: int, most: int) -> int:
    """Rows of a piece, so that all pieces are alike where that costs less than twice as many."""
    if rows <= most:
        return rows
    fewest = -(-rows // most)
    for pieces in range(fewest, 2 * fewest):
        if rows % pieces == 0:
            return rows // pieces
    return -(-rows // fewest)
