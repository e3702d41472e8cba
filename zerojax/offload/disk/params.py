"""Parameters that a compiled program reads from the disk while it runs. Experimental.

Each read is a callback within the program, and the device waits for it; a thread reads ahead. The
numbers are tested on CPU devices, and no GPU has run such a program yet.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.offload.disk.array import DiskArray

_WHOLE = -1
"""In place of an entry: the whole parameter."""


class _Read(NamedTuple):
    """The shard of a parameter, or of one entry of a stack, that a device of the mesh asks for.

    Attributes:
      number: Of the parameter.
      position: Of the device in the mesh, in C order.
      entry: Of the first dimension, or ``_WHOLE``.
    """

    number: int
    position: int
    entry: int


class ParamReader:
    """Serves a program's reads, and reads the next entry of a stack ahead, in either direction.

    Args:
      buffer_count: The most reads under way.

    Attributes:
      arrays: The parameters of the present run, by number.
    """

    def __init__(self, buffer_count: int) -> None:
        self.arrays: dict[int, DiskArray] = {}
        self._pool = ThreadPoolExecutor(buffer_count, "zerojax-params")
        self._lock = threading.Lock()
        self._ahead: dict[_Read, Future[np.ndarray]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._failed: Exception | None = None

    def use(self, arrays: dict[int, DiskArray]) -> None:
        """Sets the parameters of the next run, by number."""
        with self._lock:
            self.arrays = arrays
            self._ahead.clear()
            self._last.clear()
            self._failed = None

    def check(self) -> None:
        """Raises the first error of the last run, once the run's results are ready.

        Raises:
          DiskStateError: a parameter's bytes are not those that were written.
        """
        if self._failed is not None:
            raise self._failed

    def read(self, number: int, position: Any, entry: Any) -> np.ndarray:
        """A shard, see :class:`_Read`.

        Zeros where it cannot be read: an error here would leave the other devices waiting for
        this one for ever. :meth:`check` raises the error.
        """
        wanted = _Read(number, int(position), int(entry))
        with self._lock:
            last = self._last.get(wanted[:2], wanted.entry - 1)
            self._last[wanted[:2]] = wanted.entry
            shard = self._ahead.pop(wanted, None) or self._pool.submit(self._slice, wanted)
            after = wanted._replace(entry=2 * wanted.entry - last)
            within = 0 <= after.entry < (self.arrays[number].shape or (0,))[0]
            if wanted.entry not in (_WHOLE, last) and within and after not in self._ahead:
                self._ahead[after] = self._pool.submit(self._slice, after)
        try:
            return shard.result()
        except Exception as error:
            with self._lock:
                self._failed = self._failed or error
            array = self.arrays[number]
            shape = array.sharding.shard_shape(array.shape)
            return np.zeros(shape if wanted.entry == _WHOLE else shape[1:], array.dtype)

    def _slice(self, wanted: _Read) -> np.ndarray:
        array = self.arrays[wanted.number]
        device = array.sharding.mesh.devices.flat[wanted.position]
        index = array.sharding.devices_indices_map(array.shape)[device]
        assert index is not None
        if wanted.entry == _WHOLE:
            return array.read_slice(index)
        return array.read_slice((slice(wanted.entry, wanted.entry + 1), *index[1:]))[0]


class DiskParam:
    """A parameter on disk in a traced program: a :class:`zerojax.collectives.host.Fetchable`.

    Args:
      reader: Reads it.
      number: Of the parameter, for ``reader``.
      shape, dtype: Of the whole array.
      sharding: On the devices.
    """

    def __init__(
        self,
        reader: ParamReader,
        number: int,
        shape: Sequence[int],
        dtype: Any,
        sharding: NamedSharding,
    ) -> None:
        self.shape, self.dtype, self.ndim = tuple(shape), dtype, len(shape)
        self._read = functools.partial(reader.read, number)
        self._sharding = sharding

    def whole(self) -> jax.Array:
        """The parameter on the device."""
        return self._brought(_WHOLE, self.shape, self._sharding.spec)

    def entry(self, index: Any) -> jax.Array:
        """One entry of the first dimension, on the device."""
        return self._brought(index, self.shape[1:], PartitionSpec(*self._sharding.spec[1:]))

    def _brought(self, entry: Any, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        mesh = self._sharding.mesh
        local = NamedSharding(mesh, spec).shard_shape(shape)

        def bring(entry: jax.Array) -> jax.Array:
            result = jax.ShapeDtypeStruct(local, self.dtype)
            position = lax.axis_index(mesh.axis_names)
            return jax.pure_callback(self._read, result, position, entry)

        bring_all = jax.shard_map(
            bring, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False
        )
        return bring_all(jnp.asarray(entry, jnp.int32))
