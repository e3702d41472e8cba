"""The placement at rest of one array of a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.places import DEVICE
from zerojax.xla.types import Shaped


@dataclass(frozen=True)
class Leaf:
    """The shape, sharding and place of one array at rest.

    Attributes:
      path: the array's path in the state.
      spec: its PartitionSpec at rest, without None at its end.
      own_spec: its PartitionSpec without ZeRO: the user's spec, also without None at its end.
      reason: why ZeRO does not shard the array over all of the axis; empty if it does.
      bytes: the bytes of the full array; ``bytes_per_device`` those of the largest shard.
      place: its memory, see :mod:`zerojax.plan.places`.
      n_copies: devices that hold the same elements, for want of a dimension that divides.
      padded: its shape at rest, with dimensions padded with zeros to give equal shards; ``shape``
        without padding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    own_spec: PartitionSpec
    reason: str
    bytes: int
    bytes_per_device: int
    place: str = DEVICE
    n_copies: int = 1
    padded: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        x: Shaped,
        spec: PartitionSpec | Spec,
        own_spec: PartitionSpec | Spec,
        reason: str,
        mesh: Mesh,
    ) -> Leaf:
        """Builds the leaf of an array, abstract or concrete, with this spec, on the device."""
        spec = layout.full(spec, len(x.shape))
        named = not hasattr(x.dtype, "itemsize")  # a type, such as jnp.float32
        itemsize = jnp.dtype(x.dtype).itemsize if named else x.dtype.itemsize
        shard_shape = layout.shard_shape(x.shape, spec, mesh)
        return cls(
            path=path,
            shape=tuple(x.shape),
            dtype=x.dtype,
            spec=_trimmed(spec),
            own_spec=_trimmed(own_spec),
            reason=reason,
            bytes=math.prod(x.shape) * itemsize,
            bytes_per_device=math.prod(shard_shape) * itemsize,
            padded=layout.padded_shape(x.shape, spec, mesh),
        )

    @property
    def full_spec(self) -> Spec:
        """The PartitionSpec with an entry for each dimension, and with the array's path."""
        return layout.LeafSpec(layout.full(self.spec, len(self.shape)), self.path)

    @property
    def sharded(self) -> bool:
        """True if ZeRO shards the array, over all of the axis or a part of it."""
        return self.spec != self.own_spec

    @property
    def lost(self) -> int:
        """Bytes on each device beyond the array's share, for want of a dimension that divides."""
        return self.bytes_per_device - self.bytes_per_device // self.n_copies

    @property
    def even(self) -> bool:
        """True if the array at rest has no padding."""
        return self.padded == self.shape

    @property
    def divided(self) -> bool:
        """True if parts of an axis shard the array, on a mesh divided into parts."""
        return any(layout.SubAxis.of(a) for entry in self.spec for a in layout.axes(entry))

    @property
    def plain(self) -> bool:
        """True if JAX can shard the array as it is stored: without padding, over full axes."""
        return self.even and not self.divided


def _trimmed(spec: PartitionSpec | Spec) -> PartitionSpec:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
