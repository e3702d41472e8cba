"""Sharded arrays, created on their devices and copied to the host shard by shard.

>>> from jax.sharding import SingleDeviceSharding
>>> rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
>>> sharding = SingleDeviceSharding(jax.devices()[0])
>>> array = from_shards((3, 2), sharding, lambda bounds: rows[*(slice(*b) for b in bounds)])
>>> [(bounds, shard.tolist()) for bounds, shard in to_host(array)]
[(((0, 3), (0, 2)), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from zerojax.offload.disk.array import DiskArray
from zerojax.plan.stored import unwrap_stored
from zerojax.weights.arrangement import Bounds

_ALIGNMENT = 64


def from_shards(
    shape: tuple[int, ...], sharding: Sharding | None, read: Callable[[Bounds], np.ndarray]
) -> jax.Array:
    """Creates an array from shards that are read one after the other, each once for its devices.

    ``jax.make_array_from_callback`` would keep the shards of all devices on the host at once.

    Args:
      shape: The shape of the global array.
      sharding: The sharding of the array; None for JAX's default device.
      read: Returns the shard within the bounds it is passed.
    """
    if sharding is None:
        return jnp.asarray(read(tuple((0, n) for n in shape)))
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_bounds(index, shape), []).append(device)
    arrays: list[jax.Array] = []
    for bounds, devices in holders.items():
        arrays += _put(read(bounds), devices, sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _put(shard: np.ndarray, devices: list[jax.Device], memory_kind: str | None) -> list[jax.Array]:
    shardings = [SingleDeviceSharding(device, memory_kind=memory_kind) for device in devices]
    # The copies keep a reference to the shard: wait, so that the host holds one shard at a time.
    return cast(
        "list[jax.Array]",
        jax.block_until_ready([jax.device_put(shard, sharding) for sharding in shardings]),
    )


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
    seen = set()
    for shard in at_rest.addressable_shards:
        bounds = clipped(_bounds(shard.index, at_rest.shape), shape)
        if bounds not in seen:
            seen.add(bounds)
            values = np.asarray(shard.data.copy())
            unpadded: tuple[slice | EllipsisType, ...] = (
                *(slice(stop - start) for start, stop in bounds),
                ...,
            )
            yield bounds, values[unpadded]


def clipped(bounds: Bounds, shape: tuple[int, ...]) -> Bounds:
    """Clips bounds in a padded array to the array without padding."""
    pairs = ((min(start, n), min(stop, n)) for (start, stop), n in zip(bounds, shape, strict=True))
    return tuple(pairs)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    assert index is not None
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
