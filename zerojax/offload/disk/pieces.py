"""The shards of an array that a process stores, and their pieces on the way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from zerojax.offload.disk.boxes import Index
from zerojax.offload.disk.space import Data


@dataclass(frozen=True)
class Shard:
    """Which part of the array, and the devices of this process that have it."""

    index: Index
    devices: tuple[jax.Device, ...]


@dataclass(frozen=True)
class Piece:
    """A piece of every shard, on its way from the disk."""

    shards: Sequence[Shard]
    reads: Sequence[Future[np.ndarray]]
    dtype: np.dtype

    def done(self) -> bool:
        return all(read.done() for read in self.reads)

    def result(self) -> dict[jax.Device, np.ndarray]:
        """It, flat, for every device of this process; devices with the same shard share one.

        Raises:
          DiskStateError: it is not what was written.
        """
        values = [read.result().view(self.dtype) for read in self.reads]
        return {
            device: value
            for shard, value in zip(self.shards, values, strict=True)
            for device in shard.devices
        }


def shards_of(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[Shard, ...]:
    """The distinct ones of this process, in the order of their indices."""
    found: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return tuple(
        Shard(tuple(slice(*bound) for bound in bounds), tuple(devices))
        for bounds, devices in sorted(found.items(), key=lambda entry: entry[0])
    )


def piece_of(x: jax.Array, start: int, stop: int) -> Data:
    """A piece of a shard; cut out on the device where the host would have to fetch the whole."""
    (device,) = x.devices()
    if device.platform == "cpu" or x.sharding.memory_kind != device.default_memory().kind:
        return np.asarray(x).reshape(-1)[start:stop]
    return _cut(x, start, stop - start)


@functools.partial(jax.jit, static_argnums=2)
def _cut(x: jax.Array, start: int, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x.reshape(-1), (start,), (size,))
