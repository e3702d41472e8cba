"""Collectives that zerojax decides on: the array sent, the place in the program, the reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.devices.mesh import batch_devices, sequence_size
from zerojax.hlo.traffic import ring_bytes
from zerojax.plan import layout
from zerojax.plan.layout import SpecEntry
from zerojax.xla.types import Equation

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, PERMUTE = "all-to-all", "collective-permute"

ENTRY, BEFORE_LOOP, USE, LOOP = "entry", "before the loop", "use", "loop"
PREFETCHED, DEFERRED, AFTER_LOOP = "loop, prefetched", "loop, deferred", "after the loop"
PRODUCED, UPDATE, STAGES = "produced", "update", "between stages"
"""Places of collectives: docs/planning.md has a table of what each value of "where" means."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """One collective.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      shape: The shape of the array that is sent: after an all-gather, before a reduce-scatter.
      dtype: The name of its dtype.
      payload: Bytes of that array that one group of devices sends together, padding included.
      devices: The number of devices in a group.
      where: The place in the program, such as :data:`ENTRY`.
      reason: The reason for the place.
      partly: Whether the result is still a partial sum, which a later collective completes.
      calls: The equations of the enclosing calls, innermost last.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    payload: int
    devices: int
    where: str = dataclasses.field(compare=False)
    reason: str = dataclasses.field(compare=False)
    partly: bool = False
    calls: tuple[Equation, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def of_gradient(self) -> bool:
        """True if a gradient is sent; otherwise a parameter, or a value computed from one."""
        if self.where == LOOP:
            return self.kind != GATHER
        return self.where in (PRODUCED, DEFERRED, AFTER_LOOP, UPDATE)

    @property
    def bytes(self) -> int:
        """Bytes that each device sends in one run, over a ring."""
        return round(ring_bytes(self.kind, self.payload, self.devices))


def group(cut: Sequence[SpecEntry], less: Sequence[SpecEntry], mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices whose shards by ``cut`` form one shard by ``less``."""
    return _shards(cut, mesh) // _shards(less, mesh)


def summed_over(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that have different rows or tokens."""
    return batch_devices(mesh) * sequence_size(mesh)


def payload(
    shape: Sequence[int],
    dtype: np.dtype,
    cut: Sequence[SpecEntry],
    less: Sequence[SpecEntry],
    mesh: Mesh | AbstractMesh,
) -> int:
    """Returns the bytes of the shards by ``cut`` that form one device's shard by ``less``."""
    shard = math.prod(layout.shard_shape(shape, cut, mesh))
    return shard * group(cut, less, mesh) * jnp.dtype(dtype).itemsize


def _shards(spec: Sequence[SpecEntry], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(layout.parts(entry, mesh) for entry in spec)
