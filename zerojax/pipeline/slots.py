"""Values of all micro-batches: as rows of the batch, and as slots of a pipeline.

The rows of a batch are sharded over all axes of the batch, "stage" included. Slots have the
micro-batches as the first dimension, and a micro-batch's rows are sharded over the other axes.
A device's rows are those of its stage's M / S micro-batches, one after another, so that slots and
rows differ on the device only.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.devices.mesh import STAGE
from zerojax.pipeline.schedule import Schedule


def slots_spec(schedule: Schedule, dim: int) -> PartitionSpec:
    """Returns the spec of slots of a stack [M, layers, ...] whose dimension ``dim`` has rows."""
    return PartitionSpec(None, STAGE, *[None] * (dim - 2), schedule.row_axes or None)


def to_slots(x: jax.Array, dim: int, schedule: Schedule) -> jax.Array:
    """Turns an array with rows of the batch along ``dim`` into slots [M, ...]."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    sizes = [schedule.mesh.shape[axis] for axis in schedule.axes]
    n, at = len(sizes), schedule.axes.index(STAGE)
    x = x.reshape(*before, *sizes, schedule.slots, -1, *after)
    x = jnp.moveaxis(x, (dim + at, dim + n), (0, 1))
    return x.reshape(schedule.micro_batches, *before, -1, *after)


def from_slots(x: jax.Array, dim: int, schedule: Schedule) -> jax.Array:
    """Turns slots [M, ...] into an array with rows of the batch along ``dim``."""
    before, after = x.shape[1 : 1 + dim], x.shape[2 + dim :]
    others = [schedule.mesh.shape[axis] for axis in schedule.row_axes]
    n, at = len(schedule.axes), schedule.axes.index(STAGE)
    x = x.reshape(schedule.stages, schedule.slots, *before, *others, -1, *after)
    x = jnp.moveaxis(x, (0, 1), (dim + at, dim + n))
    return x.reshape(*before, math.prod(x.shape[dim : dim + n + 2]), *after)


@dataclass(frozen=True, eq=False)
class Slots:
    """Rows of the batch that are stored as slots.

    Attributes:
      array: The slots [M + 1, ...], of which the last is not one of the batch's.
      dim: The dimension of the rows that holds the rows of the batch.
      schedule: The schedule.
    """

    array: jax.Array
    dim: int
    schedule: Schedule

    @functools.cached_property
    def rows(self) -> jax.Array:
        """The rows, computed at their first use."""
        return from_slots(self.array[:-1], self.dim, self.schedule)


class Streams:
    """The inputs and outputs of a pipeline's micro-batches: [stages * slots, ...] over all stages.

    At tick t the first stage reads its slot t mod K, and the last stage writes there. The slot's
    content then moves on to the next stage towards the entrance.

    Args:
      schedule: The schedule.
      reverse: Whether the last stage is the entrance.
    """

    def __init__(self, schedule: Schedule, reverse: bool) -> None:
        self._schedule, self._reverse = schedule, reverse

    def spec(self, dim: int) -> PartitionSpec:
        """Returns the spec of an operand or result with rows along ``dim``."""
        return PartitionSpec(*[None] * dim, self._schedule.axes)

    def open(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns one device's slots [K, ...] from its rows of the batch."""
        k = self._schedule.slots
        shape = (*x.shape[:dim], k, x.shape[dim] // k, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    def close(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns one device's rows of the batch from its slots [K, ...]."""
        # The output of slot k was written S - 1 ticks after the input was read.
        x = jnp.moveaxis(jnp.roll(x, 1 - self._schedule.stages, 0), 0, dim)
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])

    def micro_batch(self, entered: jax.Array) -> jax.Array:
        """Returns the number of the micro-batch that is the ``entered``-th to enter."""
        n, k = self._schedule.stages, self._schedule.slots
        return (n - 1 - entered // k) * k + entered % k if self._reverse else entered

    def first_row(self, micro_batch: jax.Array, rows: int) -> jax.Array:
        """Returns where the rows of one device in a micro-batch begin in the batch."""
        schedule = self._schedule
        stage, slot = micro_batch // schedule.slots, micro_batch % schedule.slots
        at = jnp.zeros((), micro_batch.dtype)
        for axis in schedule.axes:
            index = stage if axis == STAGE else lax.axis_index(axis)
            at = at * schedule.mesh.shape[axis] + index
        return (at * schedule.slots + slot) * rows
