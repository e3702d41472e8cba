"""Parameters that a program reads from the disk while it runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.offload.disk.array import DiskArray


class Reader:
    """Serves a program's reads, each time reading ahead what it will ask for next.

    Args:
      buffer_count: reads under way at most.
    """

    def __init__(self, buffer_count: int) -> None:
        self.arrays: dict[int, DiskArray] = {}
        self._pool = ThreadPoolExecutor(buffer_count, "zerojax-params")
        self._lock = threading.Lock()
        self._ahead: dict[tuple[int, int, int], Future[np.ndarray]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._failed: Exception | None = None

    def use(self, arrays: dict[int, DiskArray]) -> None:
        """The parameters of the next run, by number."""
        with self._lock:
            self.arrays = arrays
            self._ahead.clear()
            self._last.clear()
            self._failed = None

    def check(self) -> None:
        """Raises what went wrong in the last run: to be asked once it is over.

        Raises:
          DiskStateError: a parameter is not what was written.
        """
        if self._failed is not None:
            raise self._failed

    def read(self, number: int, position: Any, entry: Any) -> np.ndarray:
        """What the device at a position of the mesh has of a parameter, or of one entry of a
        stack; an entry below 0 asks for all of it.

        Zeros where it cannot be read, see :meth:`check`: an error here would leave the other
        devices waiting for this one for ever.
        """
        p, k = int(position), int(entry)
        with self._lock:
            step = k - self._last.get((number, p), k - 1)
            self._last[number, p] = k
            now = self._ahead.pop((number, p, k), None)
            if now is None:
                now = self._pool.submit(self._slice, number, p, k)
            if 0 <= k + step < self.arrays[number].shape[0] and step and k >= 0:
                after = number, p, k + step
                if after not in self._ahead:
                    self._ahead[after] = self._pool.submit(self._slice, *after)
        try:
            return now.result()
        except Exception as error:
            with self._lock:
                self._failed = self._failed or error
            array = self.arrays[number]
            shape = array.sharding.shard_shape(array.shape)
            return np.zeros(shape if k < 0 else shape[1:], array.dtype)

    def _slice(self, number: int, position: int, entry: int) -> np.ndarray:
        array = self.arrays[number]
        device = array.sharding.mesh.devices.flat[position]
        index = array.sharding.devices_indices_map(array.shape)[device]
        assert index is not None
        if entry < 0:
            return array.read_slice(index)
        return array.read_slice((slice(entry, entry + 1), *index[1:]))[0]


class Source:
    """A parameter on disk as the traced program knows it: it can be brought to the device.

    Args:
      reader: reads it.
      number: of the parameter.
      shape, dtype: of the whole array.
      sharding: of its way to the devices.
    """

    def __init__(
        self,
        reader: Reader,
        number: int,
        shape: Sequence[int],
        dtype: Any,
        sharding: NamedSharding,
    ) -> None:
        self.shape, self.dtype, self.ndim = tuple(shape), dtype, len(shape)
        self._reader, self._number, self._sharding = reader, number, sharding

    def whole(self) -> jax.Array:
        """All of it, on the device."""
        return self._brought(-1, self.shape, self._sharding.spec)

    def entry(self, index: Any) -> jax.Array:
        """One entry of the first dimension, on the device."""
        return self._brought(index, self.shape[1:], PartitionSpec(*self._sharding.spec[1:]))

    def _brought(self, index: Any, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        mesh = self._sharding.mesh
        local = NamedSharding(mesh, spec).shard_shape(shape)
        read = functools.partial(self._reader.read, self._number)

        def bring(index: jax.Array) -> jax.Array:
            position = jnp.zeros((), jnp.int32)
            for name in mesh.axis_names:
                position = position * mesh.shape[name] + lax.axis_index(name)
            result = jax.ShapeDtypeStruct(local, self.dtype)
            return jax.pure_callback(read, result, position, index)

        bring_all = jax.shard_map(
            bring, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False
        )
        return bring_all(jnp.asarray(index, jnp.int32))
