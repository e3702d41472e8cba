"""Arrays of a training state on a disk: an array's storage, and a handle to its current value."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import NamedSharding

from zerojax.offload.disk.slices import (
    Index,
    StoredShard,
    boxes,
    flat_chunk,
    full_index,
    meet,
    moved,
    results,
    shape_of,
    stored_shards,
)
from zerojax.offload.disk.store import RESTORE, Data, DiskStateError, DiskStore


class DiskLeaf:
    """Array storage on a disk: each distinct shard of this process, flat in C order, in chunks.

    Args:
      store: The disk.
      name: Name for keys and messages; unique in the store.
      shape, dtype, sharding: Global shape, dtype and sharding of the array.
      chunks: Consecutive element ranges of the chunks of a flat shard; every shard has the same
        ranges.

    Attributes:
      shards: The distinct shards of this process.
      generation: Number of complete updates.
      half: True if chunks were written since the last complete update.

    Raises:
      ValueError: ``chunks`` are not the elements of a shard.
    """

    store: DiskStore
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    chunks: tuple[range, ...]
    generation: int
    half: bool

    def __init__(
        self,
        store: DiskStore,
        name: str,
        shape: Sequence[int],
        dtype: np.typing.DTypeLike,
        sharding: NamedSharding,
        chunks: Sequence[range],
    ) -> None:
        self.store, self.name = store, name
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.sharding, self.chunks = sharding, tuple(chunks)
        self.shards: tuple[StoredShard, ...] = stored_shards(sharding, self.shape)
        self.generation, self.half = 0, False
        self._torn = False
        keys = [self._key(i, k) for i in range(len(self.shards)) for k in range(len(self.chunks))]
        # At exit the entire store is removed.
        weakref.finalize(self, store.forget, keys).atexit = False

    def fill(self, array: jax.Array) -> None:
        """Writes a complete array of the leaf's shape, dtype and sharding, chunk by chunk.

        Raises:
          ValueError: the array has another shape, dtype or sharding.
        """
        fits = array.sharding.is_equivalent_to(self.sharding, array.ndim)
        if (array.shape, array.dtype) != (self.shape, self.dtype) or not fits:
            raise ValueError(
                f"{self.name}: expected {self.dtype}{list(self.shape)}, {self.sharding}, got "
                f"{array.dtype}{list(array.shape)}, {array.sharding}"
            )
        data = {shard.device: shard.data for shard in array.addressable_shards}
        firsts = [shard.devices[0] for shard in self.shards]
        for k, chunk in enumerate(self.chunks):
            self.write(k, {device: flat_chunk(data[device], chunk) for device in firsts})
        self._torn = False

    def read_shard(self, i: int, k: int) -> Future[np.ndarray]:
        """Starts to read chunk ``k`` of shard ``i``, uint8 [bytes].

        Raises:
          DiskStateError: the leaf is torn, or an earlier write failed.
        """
        if self._torn:
            raise DiskStateError(self.interrupted)
        return self.store.read(self._key(i, k))

    def write(self, k: int, chunk: jax.Array | Mapping[jax.Device, Data]) -> None:
        """Starts to write chunk ``k``; no handle can be read until :meth:`advance`.

        Args:
          k: Index of the chunk.
          chunk: The chunk of each device's shard, by device or as the shards of a JAX array of any
            shape; of the devices with the same shard, one is enough.

        Raises:
          DiskStateError: an earlier write failed.
          ValueError: the chunk has another size.
        """
        if isinstance(chunk, jax.Array):
            chunk = {shard.device: shard.data for shard in chunk.addressable_shards}
        size = len(self.chunks[k])
        shard_data = [next(chunk[d] for d in shard.devices if d in chunk) for shard in self.shards]
        if wrong := [x.nbytes for x in shard_data if x.nbytes != size * self.dtype.itemsize]:
            raise ValueError(f"{self.name}: block {k} is {size} {self.dtype}, not {wrong[0]} bytes")
        self.half = True
        for i, data in enumerate(shard_data):
            self.store.write(self._key(i, k), data)

    def advance(self) -> DiskArray:
        """Completes an update and returns a handle to the new value; deletes older handles."""
        self.generation, self.half = self.generation + 1, False
        return DiskArray(self)

    @property
    def interrupted(self) -> str:
        """Error message for an array that is half updated."""
        return (
            f"{self.name} in {self.store.path} is half updated: a step was interrupted; {RESTORE}"
        )

    def torn(self) -> None:
        """Records that a step was interrupted: nothing can be read until :meth:`fill`."""
        self._torn = True

    def _key(self, shard: int, k: int) -> str:
        return f"{self.name}, shard {shard}, block {k}"


class DiskArray:
    """Handle to a :class:`DiskLeaf`'s value after an update; a leaf of a state like ``jax.Array``.

    Each use reads the disk. The next update deletes the handle.
    """

    leaf: DiskLeaf
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    ndim: int
    size: int

    def __init__(self, leaf: DiskLeaf) -> None:
        self.leaf, self._generation = leaf, leaf.generation
        self.shape, self.dtype, self.sharding = leaf.shape, leaf.dtype, leaf.sharding
        self.is_fully_addressable: bool = leaf.sharding.is_fully_addressable
        self.ndim, self.size = len(leaf.shape), math.prod(leaf.shape)
        self.nbytes: int = self.size * leaf.dtype.itemsize

    def is_deleted(self) -> bool:
        return self.leaf.generation != self._generation

    def __repr__(self) -> str:
        deleted = ", deleted" if self.is_deleted() else ""
        return (
            f"DiskArray({self.leaf.name}: {self.dtype}{list(self.shape)}, "
            f"{self.sharding.spec}, in {self.leaf.store.path}{deleted})"
        )

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        # NumPy 2 passes copy=False where a copy is not allowed.
        if copy is False:
            raise ValueError(f"{self!r} is on disk: leave out copy=False")
        values = self.read_slice(full_index(self.shape))
        return values if dtype is None else values.astype(dtype, copy=False)

    def read_slice(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the elements at a global index, from only the chunks that hold them, two at a time.

        Raises:
          DiskStateError: the bytes are not those that were written.
          ValueError: the state was passed to a later step, or another process holds some of the
            elements.
        """
        wanted = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, self.shape, strict=True))
        needed = [
            (i, k)
            for i, k in itertools.product(
                range(len(self.leaf.shards)), range(len(self.leaf.chunks))
            )
            if any(meet(box, wanted) is not None for box in self._boxes(i, k))
        ]
        reads = results((functools.partial(self._read_shard, i, k) for i, k in needed), 2)
        out, filled = np.empty(shape_of(wanted), self.dtype), 0
        for at, read in zip(needed, reads, strict=True):
            self._check()
            values, begin = read.view(self.dtype), 0
            for box in self._boxes(*at):
                end = begin + math.prod(shape_of(box))
                if (overlap := meet(box, wanted)) is not None:
                    part = values[begin:end].reshape(shape_of(box))[moved(overlap, box, -1)]
                    out[moved(overlap, wanted, -1)] = part
                    filled += part.size
                begin = end
        if filled < out.size:
            raise ValueError(f"{self!r}: other processes hold part of {wanted}")
        return out

    def load(self) -> jax.Array:
        """Reads the array onto the devices, with unchanged sharding."""
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.read_slice(index or ()), dtype=self.dtype
        )

    def _boxes(self, i: int, k: int) -> list[Index]:
        """Returns the global boxes that chunk ``k`` of shard ``i`` covers, in order."""
        shape, chunk = self.sharding.shard_shape(self.shape), self.leaf.chunks[k]
        parts = boxes(shape, chunk.start, chunk.stop)
        return [moved(box, self.leaf.shards[i].box) for box in parts]

    def _read_shard(self, i: int, k: int) -> Future[np.ndarray]:
        self._check()
        return self.leaf.read_shard(i, k)

    def _check(self) -> None:
        if self.is_deleted():
            raise ValueError(
                f"{self.leaf.name}: this state was passed to an earlier step, which wrote over it "
                "on disk: use the state that the step returned."
            )
        if self.leaf.half:
            raise DiskStateError(self.leaf.interrupted)
