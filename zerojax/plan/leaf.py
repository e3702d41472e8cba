"""How one array of a state lies at rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.places import DEVICE


@dataclass(frozen=True)
class Leaf:
    """How one array lies at rest.

    Attributes:
      path: where it stands in the state.
      spec: its PartitionSpec at rest.
      whole: the same without ZeRO: the user's own spec.
      reason: why it is not sharded; empty where it is.
      bytes: of the whole array; ``bytes_per_device`` of the largest piece.
      place: where it lies, see :mod:`zerojax.plan.places`.
      whole_over: devices that hold the same elements, for want of a dimension that divides.
      padded: its shape at rest, where a dimension is padded with zeros to lie in equal pieces;
        else ``shape``.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    whole: PartitionSpec
    reason: str
    bytes: int
    bytes_per_device: int
    place: str = DEVICE
    whole_over: int = 1
    padded: tuple[int, ...] = ()

    @classmethod
    def of(cls, path: str, x: Any, spec: Spec, whole: Spec, reason: str, mesh: Mesh) -> Leaf:
        """The leaf of an array, abstract or not, with this spec, on the device."""
        named = not hasattr(x.dtype, "itemsize")  # a type, such as jnp.float32
        itemsize = jnp.dtype(x.dtype).itemsize if named else x.dtype.itemsize
        piece = layout.piece(x.shape, spec, mesh)
        return cls(
            path=path,
            shape=tuple(x.shape),
            dtype=x.dtype,
            spec=_trimmed(spec),
            whole=_trimmed(whole),
            reason=reason,
            bytes=math.prod(x.shape) * itemsize,
            bytes_per_device=math.prod(piece) * itemsize,
            padded=layout.padded(x.shape, spec, mesh),
        )

    @property
    def sharded(self) -> bool:
        return self.spec != self.whole

    @property
    def lost(self) -> int:
        """Bytes on each device beyond the array's share, for want of a dimension that divides."""
        return self.bytes_per_device - self.bytes_per_device // self.whole_over

    @property
    def even(self) -> bool:
        """Whether the array lies at rest as it is, without zeros."""
        return self.padded == self.shape

    @property
    def divided(self) -> bool:
        """Whether parts of an axis shard the array, on a mesh of such parts."""
        return any(layout.SubAxis.of(a) for entry in self.spec for a in layout.axes(entry))

    @property
    def plain(self) -> bool:
        """Whether the array lies at rest as JAX shards one: without zeros, over whole axes."""
        return self.even and not self.divided


def _trimmed(spec: Spec) -> PartitionSpec:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
