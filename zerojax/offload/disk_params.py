"""Parameters that a compiled program reads from the disk while it runs.

Each read is a callback in the program, for which the device waits; threads prefetch. The numbers
are tested on CPU devices, and no GPU has run such a program yet.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Self, SupportsInt, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.config import OffloadParam, ZeroConfig
from zerojax.offload.disk.array import DiskArray
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import DISK, disk_sections
from zerojax.xla.types import PyTree

V = TypeVar("V")

_ENTIRE = -1
"""Value in place of an entry: the entire parameter."""


class _Read(NamedTuple):
    """A device's request for its shard of a parameter, or of one entry of a stack.

    Attributes:
      number: Index of the parameter.
      position: Index of the device in the mesh, in C order.
      entry: Index in the first dimension, or ``_ENTIRE``.
    """

    number: int
    position: int
    entry: int


class ParamReader:
    """The reads of one program, with a prefetch of the next entry of a stack in either direction.

    Args:
      config: Its ``buffer_count`` is the most reads under way; None if no parameter is offloaded.

    Attributes:
      arrays: The parameters of the present run, by index.
    """

    def __init__(self, config: OffloadParam | None) -> None:
        self.arrays: dict[int, DiskArray] = {}
        self._pool = ThreadPoolExecutor(
            2 if config is None else config.buffer_count, "zerojax-params"
        )
        self._lock = threading.Lock()
        self._ahead: dict[_Read, Future[np.ndarray]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._failed: Exception | None = None

    @classmethod
    def of(cls, config: ZeroConfig) -> Self | None:
        """Returns a reader for one program; None if the config keeps nothing on disk."""
        return cls(config.offload_param) if disk_sections(config) else None

    def use(self, values: Sequence[object]) -> None:
        """Sets the arrays of the next run: the arrays of ``values`` that are stored on disk."""
        with self._lock:
            self.arrays = {i: x for i, x in enumerate(values) if isinstance(x, DiskArray)}
            self._ahead.clear()
            self._last.clear()
            self._failed = None

    def check(self, results: PyTree = None) -> None:
        """Waits for the results of a run that reads the disk, and raises its first error.

        Raises:
          DiskStateError: A parameter's bytes are not those that were written.
        """
        # An error of a read is known once the program, which runs on without the bytes, has ended.
        if self.arrays:
            jax.block_until_ready(results)
        if self._failed is not None:
            raise self._failed

    def read(self, number: int, position: SupportsInt, entry: SupportsInt) -> np.ndarray:
        """Returns a shard, see :class:`_Read`, or zeros if the read fails; :meth:`check` raises the
        error."""
        request = _Read(number, int(position), int(entry))
        with self._lock:
            last = self._last.get(request[:2], request.entry - 1)
            self._last[request[:2]] = request.entry
            shard = self._ahead.pop(request, None) or self._pool.submit(self._slice, request)
            # A scan reads entries upwards, and its backward pass downwards.
            next_read = request._replace(entry=2 * request.entry - last)
            is_within = 0 <= next_read.entry < (self.arrays[number].shape or (0,))[0]
            if request.entry not in (_ENTIRE, last) and is_within and next_read not in self._ahead:
                self._ahead[next_read] = self._pool.submit(self._slice, next_read)
        try:
            return shard.result()
        # An error in the callback would leave the other devices waiting for this one forever.
        except Exception as error:
            with self._lock:
                self._failed = self._failed or error
            array = self.arrays[number]
            shape = array.sharding.shard_shape(array.shape)
            return np.zeros(shape if request.entry == _ENTIRE else shape[1:], array.dtype)

    def _slice(self, wanted: _Read) -> np.ndarray:
        array = self.arrays[wanted.number]
        device = array.sharding.mesh.devices.flat[wanted.position]
        index = array.sharding.devices_indices_map(array.shape)[device]
        assert index is not None
        if wanted.entry == _ENTIRE:
            return array.read_slice(index)
        return cast(
            np.ndarray, array.read_slice((slice(wanted.entry, wanted.entry + 1), *index[1:]))[0]
        )


@dataclass(frozen=True, eq=False)
class DiskParam:
    """A parameter on disk in a traced program: a :class:`zerojax.collectives.host.Fetchable`.

    Attributes:
      reader: Reads the parameter.
      number: Index of the parameter in ``values`` of :meth:`ParamReader.use`.
      shape, dtype: Global shape and dtype.
      sharding: Sharding on the devices.
    """

    reader: ParamReader
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def fetched(self) -> jax.Array:
        """Reads the entire parameter onto the devices, sharded."""
        return self._brought(_ENTIRE, self.shape, self.sharding.spec)

    def entry(self, index: ArrayLike) -> jax.Array:
        """Reads one entry of the first dimension onto the devices, sharded."""
        return self._brought(index, self.shape[1:], PartitionSpec(*self.sharding.spec[1:]))

    def _brought(self, entry: ArrayLike, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        mesh = self.sharding.mesh
        read = functools.partial(self.reader.read, self.number)
        local = NamedSharding(mesh, spec).shard_shape(shape)

        def read_shard(entry: jax.Array) -> jax.Array:
            result = jax.ShapeDtypeStruct(local, self.dtype)
            # JAX does not tell a callback on which device it runs.
            position = lax.axis_index(mesh.axis_names)
            return cast(jax.Array, jax.pure_callback(read, result, position, entry))

        read_shards = jax.shard_map(
            read_shard, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False
        )
        return cast(jax.Array, read_shards(jnp.asarray(entry, jnp.int32)))


def beside_disk(values: Sequence[V | None], leaves: Sequence[Leaf]) -> list[V | None]:
    """Returns ``values`` as a program takes them: None in place of each leaf on disk."""
    return [None if leaf.place == DISK else x for x, leaf in zip(values, leaves, strict=True)]
