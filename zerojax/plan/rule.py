"""The rule by which ZeRO shards an array over the shard axis.

1. The user's own spec stays. Where it names the shard axis, that is all.
2. An array below the persistence threshold stays whole.
3. Of the dimensions that the axis divides, the largest is sharded, and of those that the user's
   spec leaves free before the others: one of these is sharded again, piece by piece.
4. Where the axis divides no dimension, the array stays whole.

Sizes are those of one device's piece under the user's spec. What stays whole has a reason, which
the plan prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from zerojax.plan import layout
from zerojax.plan.layout import Spec


class ShardSpec(NamedTuple):
    """Where an array is sharded.

    Attributes:
      spec: one entry a dimension, the user's own axes among them.
      reason: why the shard axis is not among them; empty where it is.
    """

    spec: Spec
    reason: str


def shard_spec(shape: Sequence[int], own: Spec, mesh: Mesh, axis: str, smallest: int) -> ShardSpec:
    """Applies the rule to one array.

    Args:
      shape: of the whole array.
      own: the user's spec, one entry a dimension, without axes of size 1, which shard nothing.
      mesh, axis: the devices, and the axis over which ZeRO shards.
      smallest: arrays with fewer elements stay whole.

    Example:
      >>> import zerojax
      >>> shard_spec((6, 16), (None, None), zerojax.mesh(), "data", 0).spec
      (None, 'data')
      >>> shard_spec((6, 10), (None, None), zerojax.mesh(), "data", 0).reason
      'no dimension of (6, 10) is divisible by 8'
    """
    n = mesh.shape[axis]
    if any(axis in layout.axes(entry) for entry in own):
        return ShardSpec(own, f"its own spec takes the {axis!r} axis")
    if n == 1:
        return ShardSpec(own, f"the {axis!r} axis has one device")
    if math.prod(shape) < smallest:
        reason = f"below stage3_param_persistence_threshold ({smallest:,} elements)"
        return ShardSpec(own, reason)
    piece = layout.piece(shape, own, mesh)
    divisible = [d for d, size in enumerate(piece) if size and size % n == 0]
    if not divisible:
        whole = str(tuple(shape))
        what = whole if piece == tuple(shape) else f"{piece}, a piece of {whole},"
        return ShardSpec(own, f"no dimension of {what} is divisible by {n}")
    free = [d for d in divisible if own[d] is None]
    largest = max(free or divisible, key=lambda d: piece[d])
    return ShardSpec(layout.within(own, largest, axis), "")


def check_own_spec(path: str, shape: Sequence[int], spec: Spec, mesh: Mesh) -> None:
    """Refuses a spec of the user's that does not fit the array or the mesh.

    Raises:
      ValueError: names the leaf, the axis and the remedy.
    """
    if len(spec) != len(shape):
        raise ValueError(f"{path}: its PartitionSpec {spec} does not fit its shape {tuple(shape)}")
    named = [a for entry in spec for a in layout.axes(entry)]
    if twice := [a for a in named if named.count(a) > 1]:
        raise ValueError(
            f"{path}: its PartitionSpec {spec} names the axis {twice[0]!r} twice: an axis cuts one "
            "dimension of an array. Take it out of one."
        )
    for d, entry in enumerate(spec):
        unknown = [a for a in layout.axes(entry) if a not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"{path}: its PartitionSpec names the axis {unknown[0]!r}, but the mesh has "
                f"{mesh.axis_names}. Pass a mesh with that axis, or logical axis rules that map it."
            )
        if shape[d] % layout.parts(entry, mesh):
            raise ValueError(
                f"{path}: dimension {d} of {tuple(shape)} is not divisible by the "
                f"{layout.parts(entry, mesh)} devices of axis {entry!r} in its own PartitionSpec."
            )
