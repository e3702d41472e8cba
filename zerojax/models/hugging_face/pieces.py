"""Sharded arrays, loaded onto their devices and copied to the host piece by piece.

>>> from jax.sharding import SingleDeviceSharding
>>> rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
>>> there = SingleDeviceSharding(jax.devices()[0])
>>> array = from_pieces((3, 2), there, lambda bounds: rows[*(slice(*b) for b in bounds)])
>>> to_host(array, 1).tolist()
[2.0, 3.0]
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

Bounds = tuple[tuple[int, int], ...]  # each dimension's first index, and the one after its last


def from_pieces(
    shape: tuple[int, ...], sharding: Sharding | None, read: Callable[[Bounds], np.ndarray]
) -> jax.Array:
    """An array whose pieces are read one after the other, each for the devices that hold it.

    `jax.make_array_from_callback` would keep the pieces of all devices on the host at once.

    Args:
      shape: The shape of the whole array.
      sharding: The sharding of the array; None for JAX's default device.
      read: Returns the piece within such bounds.
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


def _put(piece: np.ndarray, devices: list[jax.Device], memory_kind: str | None) -> list[jax.Array]:
    places = [SingleDeviceSharding(device, memory_kind=memory_kind) for device in devices]
    # The copies keep this piece: wait for them, so that the host holds one piece at a time.
    return jax.block_until_ready([jax.device_put(piece, place) for place in places])


def to_host(array: jax.Array | np.ndarray, layer: int | None = None) -> np.ndarray:
    """The array, or one index of its first dimension, in host memory of its own.

    `np.asarray(array)` is not used: JAX keeps its result for as long as the array lives, so that
    a model saved tensor by tensor would pile up on the host.
    """
    shape = array.shape if layer is None else array.shape[1:]
    if not isinstance(array, jax.Array):
        return np.ascontiguousarray(array if layer is None else array[layer]).reshape(shape)
    whole = np.empty(shape, array.dtype)
    seen = set()
    for shard in array.addressable_shards:
        bounds = _bounds(shard.index, array.shape)
        if bounds in seen or (layer is not None and not bounds[0][0] <= layer < bounds[0][1]):
            continue
        seen.add(bounds)
        part = shard.data.copy() if layer is None else shard.data[layer - bounds[0][0]]
        inner = bounds if layer is None else bounds[1:]
        whole[tuple(slice(*each) for each in inner)] = part
    return whole


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    assert index is not None
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
