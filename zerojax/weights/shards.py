"""Sharded arrays, created on their devices and copied to the host shard by shard.

>>> from jax.sharding import SingleDeviceSharding
>>> rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
>>> sharding = SingleDeviceSharding(jax.devices()[0])
>>> array = from_shards((3, 2), sharding, lambda shard: rows[shard.box])
>>> [(bounds, shard.tolist()) for bounds, shard in to_host(array)]
[(((0, 3), (0, 2)), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from zerojax.offload.disk.array import DiskArray
from zerojax.offload.disk.slices import StoredShard, full_index, stored_shards
from zerojax.plan import layout
from zerojax.plan.stored import unpad, unwrap_stored
from zerojax.weights.arrangement import Bounds

_ALIGNMENT = 64


def from_shards(
    shape: tuple[int, ...],
    sharding: Sharding | None,
    read: Callable[[StoredShard], np.ndarray],
) -> jax.Array:
    """Creates an array from shards that are read one after the other, each once for its devices.

    ``jax.make_array_from_callback`` would keep the shards of all devices on the host at once.

    Args:
      shape: The shape of the global array.
      sharding: The sharding of the array; None for JAX's default device.
      read: Returns the values of a shard.
    """
    if sharding is None:
        return jnp.asarray(read(StoredShard(full_index(shape), (), jax.process_index())))
    arrays: list[jax.Array] = []
    for shard in stored_shards(sharding, shape):
        values = read(shard)
        # The copies refer to the values: wait, so that the host holds one shard at a time.
        arrays += jax.block_until_ready(
            [
                jax.device_put(
                    values, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                )
                for device in shard.devices
            ]
        )
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def padded_shape(shape: Sequence[int], sharding: Sharding | None) -> tuple[int, ...]:
    """Returns the shape of an array at rest, padded so that its shards have equal sizes."""
    shape = tuple(shape)
    if not isinstance(sharding, NamedSharding):
        return shape
    return layout.padded_shape(shape, layout.full(sharding.spec, len(shape)), sharding.mesh)


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns zeros aligned to 64 bytes, which a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def to_host(array: Any) -> Iterator[tuple[Bounds, np.ndarray]]:
    """Yields the bounds and values of an array's distinct shards on this process, one at a time.

    Shards of a JAX array are copied to host memory without ``np.asarray(array)``: JAX caches that
    result for as long as the array lives, so a model saved tensor by tensor would accumulate on
    the host.

    Args:
      array: A NumPy or JAX array, or an array at rest, whose padding is left out.
    """
    shape = tuple(array.shape)
    at_rest = unwrap_stored(array)
    if isinstance(at_rest, DiskArray):
        at_rest = at_rest.load()
    if not isinstance(at_rest, jax.Array):
        yield tuple((0, n) for n in shape), np.asarray(at_rest)
        return
    for shard in at_rest.addressable_shards:
        if shard.replica_id == 0:
            pairs = zip(shard.index, at_rest.shape, strict=True)
            bounds = clipped(tuple(each.indices(n)[:2] for each, n in pairs), shape)
            inside = tuple(stop - start for start, stop in bounds)
            yield bounds, np.asarray(unpad(np.asarray(shard.data.copy()), inside))


def clipped(bounds: Bounds, shape: tuple[int, ...]) -> Bounds:
    """Clips bounds in a padded array to the array without padding."""
    pairs = ((min(start, n), min(stop, n)) for (start, stop), n in zip(bounds, shape, strict=True))
    return tuple(pairs)
