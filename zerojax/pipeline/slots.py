"""Values of all micro-batches: as rows of the batch, and as slots of a pipeline.

The rows of a batch are sharded over all axes of the batch, "stage" included. A device's rows are
those of its stage's M / S micro-batches, one after another. Slots have the micro-batches as the
first dimension, and a micro-batch's rows are sharded over the other axes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.devices.mesh import STAGE
from zerojax.pipeline.schedule import Schedule


def own_slots(x: jax.Array, dim: int, slots: int) -> jax.Array:
    """Splits one device's rows, along ``dim``, into its micro-batches: [slots, ...]."""
    shape = (*x.shape[:dim], slots, x.shape[dim] // slots, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def own_rows(x: jax.Array, dim: int) -> jax.Array:
    """Joins the micro-batches [slots, ...] of one device to rows along ``dim``."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def rows_spec(schedule: Schedule, dim: int) -> PartitionSpec:
    """Returns the spec of rows of the batch along ``dim``."""
    return PartitionSpec(*[None] * dim, schedule.axes)


def slots_spec(schedule: Schedule, dim: int) -> PartitionSpec:
    """Returns the spec of a stack of layers in slots [M + 1, layers, ...]; ``dim`` is the dimension
    of rows in the stack [layers, ...] itself."""
    return PartitionSpec(None, STAGE, *[None] * (dim - 1), schedule.row_axes or None)


def to_slots(x: jax.Array, dim: int, schedule: Schedule) -> jax.Array:
    """Turns a stack of layers with rows of the batch along ``dim`` [layers, ...] into slots
    [M + 1, layers, ...]. The last slot is for the idle ticks."""
    sizes = [schedule.mesh.shape[axis] for axis in schedule.axes]
    n, at = len(sizes), schedule.axes.index(STAGE)
    x = x.reshape(*x.shape[:dim], *sizes, schedule.slots, -1, *x.shape[dim + 1 :])
    x = jnp.moveaxis(x, (dim + at, dim + n), (0, 1))  # [stages, slots, ..., *others, rows, ...]
    x = x.reshape(schedule.micro_batches, *x.shape[2 : 2 + dim], -1, *x.shape[2 + dim + n :])
    return jnp.concatenate([x, jnp.zeros_like(x[:1])])


def from_slots(x: jax.Array, dim: int, schedule: Schedule) -> jax.Array:
    """The inverse of :func:`to_slots`."""
    others = [schedule.mesh.shape[axis] for axis in schedule.row_axes]
    n, at = len(schedule.axes), schedule.axes.index(STAGE)
    x = x[:-1].reshape(
        schedule.stages, schedule.slots, *x.shape[1 : 1 + dim], *others, -1, *x.shape[2 + dim :]
    )
    x = jnp.moveaxis(x, (0, 1), (dim + at, dim + n))
    return x.reshape(*x.shape[:dim], math.prod(x.shape[dim : dim + n + 2]), *x.shape[dim + n + 2 :])
