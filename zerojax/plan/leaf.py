"""The placement at rest of one array of a state."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.places import DEVICE
from zerojax.plan.rule import ShardSpec, check_own_spec, shard_spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Shaped


@dataclass(frozen=True)
class Leaf:
    """The shape, sharding and place of one array at rest.

    Attributes:
      path: The array's path in the state.
      shape, dtype: Those of the array without padding.
      own_spec: Its PartitionSpec without ZeRO: the user's spec, without None at its end.
      chosen: The answer of the rule: the spec at rest, and why ZeRO does not shard the array over
        all of the axis.
      slices: By dimension, the number of slices into which the mesh splits it.
      place: Its memory, see :mod:`zerojax.plan.places`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    own_spec: PartitionSpec
    chosen: ShardSpec
    slices: tuple[int, ...]
    place: str = DEVICE

    @classmethod
    def at_rest(
        cls, path: str, x: Shaped, own: PartitionSpec | Spec | None, mesh: Mesh, config: ZeroConfig
    ) -> Leaf:
        """Plans an array, abstract or concrete, with this spec of the user's, on the device.

        Raises:
          ValueError: The spec does not fit the array or the mesh.
        """
        own_spec = layout.full(own, len(x.shape))
        check_own_spec(path, x.shape, own_spec, mesh)
        own_spec = layout.cutting(own_spec, mesh)
        chosen = shard_spec(x.shape, own_spec, mesh, config)
        slices = tuple(layout.parts(entry, mesh) for entry in chosen.spec)
        return cls(path, tuple(x.shape), x.dtype, _trimmed(own_spec), chosen, slices)

    @classmethod
    def replicated(cls, path: str, x: Shaped, reason: str) -> Leaf:
        """Plans an array that every device holds, for this reason."""
        n = len(x.shape)
        chosen = ShardSpec((None,) * n, reason)
        return cls(path, tuple(x.shape), x.dtype, PartitionSpec(), chosen, (1,) * n)

    def with_spec(self, spec: PartitionSpec | Spec, mesh: Mesh, reason: str = "") -> Leaf:
        """Returns the leaf with another spec at rest."""
        spec = layout.full(spec, len(self.shape))
        slices = tuple(layout.parts(entry, mesh) for entry in spec)
        return dataclasses.replace(self, chosen=ShardSpec(spec, reason), slices=slices)

    @functools.cached_property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec at rest, without None at its end."""
        return _trimmed(self.chosen.spec)

    @functools.cached_property
    def full_spec(self) -> Spec:
        """The PartitionSpec with an entry for each dimension, and with the array's path."""
        return layout.LeafSpec(self.chosen.spec, self.path)

    @property
    def reason(self) -> str:
        """Why ZeRO does not shard the array over all of the axis; empty if it does."""
        return self.chosen.reason

    @functools.cached_property
    def padded(self) -> tuple[int, ...]:
        """The shape at rest: dimensions are padded with zeros to give equal shards."""
        # NamedSharding.shard_shape and jit refuse a dimension that does not divide.
        return tuple(-(-n // k) * k for n, k in zip(self.shape, self.slices, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the full array."""
        return jaxprs.nbytes(self)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of a shard."""
        return math.prod(self.padded) // math.prod(self.slices) * jaxprs.bits(self.dtype) // 8

    @property
    def sharded(self) -> bool:
        """True if ZeRO shards the array, over all of the axis or a part of it."""
        return self.spec != self.own_spec

    @property
    def lost(self) -> int:
        """Bytes on each device beyond the array's share, for want of a dimension that divides."""
        return self.bytes_per_device - self.bytes_per_device // self.chosen.n_copies

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


def _trimmed(spec: Spec) -> PartitionSpec:
    # To JAX, P("data") and P("data", None) are unequal, although they shard alike.
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
