"""Sub-groups of at most ``sub_group_size`` elements: the rows of the state that stream through the
device together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zerojax.offload.separate import Cluster
from zerojax.plan import layout

LARGEST = 2**25
"""The most elements of a sub-group, whatever the config: its state passes through the device at 12
bytes an element under Adam, and DeepSpeed's default of 1e9 elements would not fit."""


class ArrayPlacement(NamedTuple):
    """The place and sharding of an array of the update.

    Attributes:
      shape, dtype, spec: Global shape, dtype and PartitionSpec of the array.
      place: One of :mod:`zerojax.plan.places`.
      padded: Shape at rest, with zeros at the ends of its dimensions; ``shape`` if not padded.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    place: str
    padded: tuple[int, ...]

    def local(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the shape of one device's shard."""
        return layout.shard_shape(self.padded, layout.full(self.spec, len(self.shape)), mesh)

    def rows(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the shape of one device's shard as rows: all dimensions but the last merged."""
        local = self.local(mesh)
        return local if len(local) < 2 else (math.prod(local[:-1]), local[-1])

    def row_size(self, mesh: Mesh) -> int:
        """Returns the number of elements in a row of :meth:`rows`."""
        return math.prod(self.rows(mesh)[1:])

    def axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which the array is sharded."""
        return tuple(a for entry in self.spec for a in layout.axes(entry))


class GroupRows(NamedTuple):
    """Rows ``start`` to ``start + rows`` of each shard of a cluster's arrays; None for all rows."""

    cluster: Cluster
    start: int
    rows: int | None


Group = tuple[GroupRows, ...]
"""One half of a sub-group of the config. The programs of the update take one such group at a time;
their docstrings call a group a sub-group."""


def is_sent_unsplit(group: Group) -> bool:
    """Returns whether the group's clusters pass through the device unsplit."""
    return any(part.rows is None for part in group)


def groups(
    clusters: Sequence[Cluster], placements: Sequence[ArrayPlacement], mesh: Mesh, largest: int
) -> list[Group]:
    """Packs clusters into sub-groups, similar ones next to each other.

    A sub-group passes through the device in two halves. Three halves are on the device at a time:
    one is coming in, one is being updated, one is going out. Each returned group is such a half. A
    cluster that passes unsplit is a group of its own; equal ones that compute with matrices are a
    group together, at least as many as give each device a matrix.

    Args:
      clusters: The clusters of the update.
      placements: The placement of each argument of the update.
      mesh: The devices.
      largest: The most elements of a sub-group, on each device.
    """
    half = _half(largest)
    packed: list[Group] = []
    current: list[GroupRows] = []
    room = 0
    for part in _split(clusters, placements, mesh, half):
        arrays = [placements[i] for i in part.cluster.inputs]
        if part.rows is not None:
            size = part.rows * arrays[0].row_size(mesh)
        else:
            size = max((math.prod(x.local(mesh)) for x in arrays), default=0)
        # What a program replaces is one donated argument, so that two of its ranges are two groups.
        is_repeated = any(part.cluster is other.cluster for other in current)
        if is_repeated or size > room or any(_kind(part) != _kind(other) for other in current[:1]):
            packed.append(tuple(current))
            current, room = [], _room(part, arrays, half)
        current.append(part)
        room -= size
    return [*filter(None, packed), tuple(current)] if current else packed


def _kind(part: GroupRows) -> object:
    """Returns a value that is equal for parts that may be in one group."""
    if part.rows is not None:
        return None
    return part.cluster.key if part.cluster.matrices else id(part.cluster)


def _room(part: GroupRows, arrays: Sequence[ArrayPlacement], half: int) -> int:
    """Returns the most elements of a group that begins with a part, on each device. Matrices fill a
    multiple of one matrix, so that the devices compute with equally many."""
    if part.rows is not None or not part.cluster.matrices:
        return half
    matrix = max(math.prod(x.shape[-2:]) for x in arrays)
    return max(1, half // matrix) * matrix


def _split(
    clusters: Sequence[Cluster], placements: Sequence[ArrayPlacement], mesh: Mesh, half: int
) -> Iterator[GroupRows]:
    # Side by side, equal clusters make equal groups, which share one compiled program.
    for cluster in sorted(clusters, key=lambda c: (not c.elementwise, c.key)):
        arrays = [placements[i] for i in cluster.inputs]
        # Rows of shards that are cut otherwise are other elements of the array.
        if not cluster.elementwise or len({a.spec for a in arrays}) > 1:
            yield GroupRows(cluster, 0, None)
            continue
        for rows in _row_ranges(arrays[0], mesh, half):
            yield GroupRows(cluster, rows.start, len(rows))


def disk_chunks(placement: ArrayPlacement, mesh: Mesh, largest: int) -> list[range]:
    """Returns the element ranges of the chunks into which flat shards are split on a disk."""
    width = placement.row_size(mesh)
    rows = _row_ranges(placement, mesh, _half(largest))
    return [range(r.start * width, r.stop * width) for r in rows]


def _row_ranges(placement: ArrayPlacement, mesh: Mesh, half: int) -> Iterator[range]:
    """Yields the row ranges of an array's shards that are updated together."""
    n = placement.rows(mesh)[0]
    rows = _even(n, max(1, half // placement.row_size(mesh)))
    for start in range(0, n, rows):
        yield range(start, min(start + rows, n))


def _half(largest: int) -> int:
    return max(1, min(largest, LARGEST) // 2)


def _even(rows: int, most: int) -> int:
    """Returns the rows of a range; all ranges are equal if that takes less than twice as many."""
    if rows <= most:
        return rows
    # A shorter last range would be one more program to compile.
    fewest = -(-rows // most)
    for ranges in range(fewest, 2 * fewest):
        if rows % ranges == 0:
            return rows // ranges
    return -(-rows // fewest)
