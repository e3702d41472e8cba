"""Collectives that zerojax decides on: the array sent, the place in the program, the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.devices.mesh import batch_devices, sequence_size
from zerojax.plan import layout
from zerojax.plan.layout import SpecEntry
from zerojax.xla import jaxprs

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, PERMUTE = "all-to-all", "collective-permute"

ENTRY, BEFORE_LOOP, USE, LOOP = "entry", "before the loop", "use", "loop"
PREFETCHED, DEFERRED, AFTER_LOOP = "loop, prefetched", "loop, deferred", "after the loop"
PRODUCED, UPDATE, STAGES = "produced", "update", "between stages"
"""Places of collectives: docs/planning.md has a table of what each value of "where" means."""

SUMMED_FIRST = "summed over all micro-batches first"
NORM = "norm of sharded gradients"
"""Reasons for a place."""


@dataclass(frozen=True)
class Decision:
    """One collective that zerojax requests.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      arrays: The paths of the parameters that are sent, or whose gradients are sent; several for
        values that are computed from several parameters; none for other values.
      shape: Shape of the array that is sent: after a gather, or before a scatter.
      dtype: Dtype of that array.
      bytes: Bytes that each device sends in one run, over a ring: (n - 1) / n of the array for n
        devices, twice that for an all-reduce.
      times: Runs in a step, including the iterations of the loops around the collective; each
        branch of a conditional counts.
      exact: False in a loop with an unknown number of iterations; such a loop counts once.
      where: "entry", "before the loop", "use", "loop", "loop, prefetched", "loop, deferred",
        "after the loop", "produced", "update" or "between stages".
      reason: The reason for the place.
      line: The line of the program that uses the array, or that its gradient comes from, as
        "model.py:7"; empty if unknown.
      compute: The dtype in which products read the array as it is sent; empty if they read it in
        the compute dtype, or if no product reads it.
    """

    kind: str
    arrays: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    times: int
    exact: bool
    where: str
    reason: str
    line: str
    compute: str = ""

    @property
    def array(self) -> str:
        """The paths, joined by commas."""
        return ", ".join(self.arrays)

    @property
    def bytes_a_step(self) -> int:
        """Bytes that each device sends in a step."""
        return self.bytes * self.times


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
    return shard * group(cut, less, mesh) * jaxprs.bits(jnp.dtype(dtype)) // 8


def _shards(spec: Sequence[SpecEntry], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(layout.parts(entry, mesh) for entry in spec)
