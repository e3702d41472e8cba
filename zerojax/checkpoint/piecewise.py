"""Checkpoint I/O in slices, for arrays that orbax cannot write because they are stored on a disk or
padded. Padding is not written. :func:`fill` reads arrays back onto a disk."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Sharding

from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.saved import block_shape
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.slices import (
    Index,
    StoredShard,
    boxes,
    full_index,
    meet,
    moved,
    results,
    shape_of,
)
from zerojax.plan.places import PINNED
from zerojax.plan.stored import StoredArray, unwrap_stored

CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of a chunk in a checkpoint; small shards then read small chunks."""

_TOGETHER = 128 * 2**20
"""Bytes written in one transaction; the next slices are read while the transaction commits."""

_THREADS = 2


class PiecewiseHandler(ocp.type_handlers.TypeHandler):
    """Writes :class:`DiskArray` and :class:`StoredArray` as orbax writes NumPy arrays; orbax's
    built-in handler reads them.

    ``serialize`` copies arrays that are in memory. The next training step overwrites arrays on a
    disk, so wait for the write before that step.

    Attributes:
      shares: This process's shares of the checksums of the disk arrays in the last write, by
        orbax's name.
    """

    def __init__(self) -> None:
        self.shares: dict[str, int] = {}

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self,
        values: Sequence[DiskArray | StoredArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: object = None,
    ) -> Sequence[ocp.future.Future]:
        arrays = [_Array.of(value) for value in values]
        # Orbax creates its folder first.
        write = self._write(arrays, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(write, name="piecewise")]

    async def _write(
        self, arrays: Sequence[_Array], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        shares: dict[str, list[Future[int]]] = {}
        with ThreadPoolExecutor(_THREADS, "zerojax-checksum") as pool:
            transactions = _Transactions()
            for array, info in zip(arrays, infos, strict=True):
                await info.await_path_creation()
                written = _write_blocks(array, info, transactions)
                if not array.on_disk:  # the devices compute its checksum
                    deque(written, maxlen=0)
                    continue
                shares[info.name] = [
                    pool.submit(share, block, [s.start for s in index]) for index, block in written
                ]
            transactions.finish()
        self.shares = {name: sum(x.result() for x in parts) for name, parts in shares.items()}

    async def metadata(self, infos: object) -> NoReturn:
        raise NotImplementedError("orbax's own handler reads them")

    async def deserialize(self, infos: object, args: object = None) -> NoReturn:
        raise NotImplementedError("orbax's own handler reads them")


class _Transactions:
    """Combines writes into few transactions, because each one costs ocdbt a new root."""

    def __init__(self) -> None:
        self._bytes = 0
        self._open = tensorstore.Transaction(atomic=True)
        self._under_way: list[tensorstore.Future[None] | tensorstore.WriteFutures] = []
        self._staged: list[tensorstore.WriteFutures] = []

    def create(self, spec: Mapping[str, object], context: tensorstore.Context) -> None:
        """Creates an array."""
        tensorstore.open(
            spec, create=True, open=True, context=context, transaction=self._open
        ).result()

    def write(
        self,
        spec: Mapping[str, object],
        context: tensorstore.Context,
        index: Index,
        block: np.ndarray,
    ) -> None:
        """Stages the write of a block, which must not change afterwards."""
        store = tensorstore.open(
            spec, open=True, assume_metadata=True, context=context, transaction=self._open
        ).result()
        self._staged.append(store[index].write(block, can_reference_source_data_indefinitely=True))
        self._bytes += block.nbytes
        if self._bytes >= _TOGETHER:
            self._send()

    def _send(self) -> None:
        self._settle()
        for staged in self._staged:
            staged.copy.result()
        self._open.commit_async()
        self._under_way = [self._open.future, *self._staged]
        self._open, self._staged, self._bytes = tensorstore.Transaction(atomic=True), [], 0

    def _settle(self) -> None:
        for write in self._under_way:
            write.result()
        self._under_way = []

    def finish(self) -> None:
        """Waits until every write is committed."""
        self._send()
        self._settle()


class _Array(NamedTuple):
    """An array to write.

    Attributes:
      shape, padded: Its shape without padding, and its shape at rest.
      blocks: The indices at rest and the values of the blocks that this process writes.
      on_disk: Whether the blocks are read from a disk; otherwise they are copies in host memory.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    blocks: Iterable[tuple[Index, np.ndarray]]
    on_disk: bool

    @classmethod
    def of(cls, x: DiskArray | StoredArray) -> _Array:
        """Describes ``x``; copies its shards to host memory unless they are on a disk."""
        at_rest = unwrap_stored(x)
        on_disk = isinstance(at_rest, DiskArray)
        blocks = _disk_blocks(at_rest) if on_disk else _host_shards(at_rest)
        return cls(x.shape, at_rest.shape, at_rest.dtype, at_rest.sharding, blocks, on_disk)


def _disk_blocks(x: DiskArray) -> Iterator[tuple[Index, np.ndarray]]:
    leaf, shard_shape = x.leaf, x.sharding.shard_shape(x.shape)
    for i, shard in enumerate(leaf.shards):
        if shard.owner != jax.process_index():
            continue
        # Prefetches one slice.
        reads = (functools.partial(leaf.read_shard, i, k) for k in range(len(leaf.chunks)))
        for chunk, values in zip(leaf.chunks, results(reads, 2), strict=True):
            flat, offset = values.view(x.dtype), 0
            for box in boxes(shard_shape, chunk.start, chunk.stop):
                size = math.prod(shape_of(box))
                block = flat[offset : offset + size].reshape(shape_of(box))
                yield moved(box, shard.box), block
                offset += size


def _host_shards(x: jax.Array) -> list[tuple[Index, np.ndarray]]:
    own_shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    # A view of a device's memory would prevent the next step from donating the array; of an array
    # in pinned memory the save has a copy.
    is_pinned = x.sharding.memory_kind == PINNED
    is_cpu = any(shard.device.platform == "cpu" for shard in own_shards)
    for shard in () if is_pinned or is_cpu else own_shards:
        shard.data.copy_to_host_async()
    copy = np.array if is_cpu and not is_pinned else np.asarray
    return [
        (
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(shard.index, x.shape, strict=True)),
            copy(shard.data),
        )
        for shard in own_shards
    ]


def _write_blocks(
    x: _Array, info: ocp.type_handlers.ParamInfo, transactions: _Transactions
) -> Iterator[tuple[Index, np.ndarray]]:
    """Writes this process's blocks of an array; yields the indices and values of each."""
    # A block that ends within a chunk costs a second write of the chunk.
    most = CHUNK_BYTES // 8 if x.on_disk else CHUNK_BYTES
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=x.shape,
        local_shape=chunk_of(x.padded, x.sharding, x.dtype.itemsize, most),
        dtype=x.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
    )
    if jax.process_index() == 0:
        transactions.create(spec, info.ts_context)
    for box, values in x.blocks:
        if (inside := meet(box, full_index(x.shape))) is not None:
            block = values[moved(inside, box, -1)]
            transactions.write(spec, info.ts_context, inside, block)
            yield inside, block


def chunk_of(
    shape: tuple[int, ...], sharding: Sharding, itemsize: int, most: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Returns the shape of a chunk of at most ``most`` bytes.

    It is contiguous in a flattened shard, so that one write fills it.

    Example:
      >>> import jax, zerojax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> sharding = NamedSharding(zerojax.mesh(), PartitionSpec(None, "data"))
      >>> chunk_of((3, 800, 2**20), sharding, 4)
      (1, 10, 1048576)
    """
    shard = sharding.shard_shape(shape)
    sizes = block_shape(shard, itemsize, most)
    for d, size in enumerate(sizes):
        if shard[d] != shape[d]:  # no chunk may span two shards
            sizes[d] = next(n for n in range(size, 0, -1) if shard[d] % n == 0)
    return tuple(sizes)


def sum_shares(shares: Iterable[str]) -> dict[str, int]:
    """Sums the shares of all processes, passed as JSON, to the checksums of the full arrays.

    Example:
      >>> sum_shares(['{"w": 4294967295}', '{"w": 3}'])
      {'w': 2}
    """
    by_process = [json.loads(each) for each in shares]
    return {name: sum(each[name] for each in by_process) % 2**32 for name in by_process[0]}


def fill(leaf: DiskLeaf, read: Callable[[StoredShard, Index], np.ndarray]) -> None:
    """Writes all slices of a leaf to its disk.

    Args:
      leaf: The leaf to fill, padded or not.
      read: Returns a box of a shard at rest.
    """
    shard_shape = leaf.sharding.shard_shape(leaf.shape)

    def read_slice(k: int, i: int) -> np.ndarray:
        chunk, shard = leaf.chunks[k], leaf.shards[i]
        flat, offset = np.empty(len(chunk), leaf.dtype), 0
        for box in boxes(shard_shape, chunk.start, chunk.stop):
            values = read(shard, moved(box, shard.box))
            flat[offset : offset + values.size] = values.reshape(-1)
            offset += values.size
        return flat

    with ThreadPoolExecutor(_THREADS, "zerojax-restore") as pool:
        jobs = itertools.product(range(len(leaf.chunks)), range(len(leaf.shards)))
        reads = results(
            (functools.partial(pool.submit, read_slice, *job) for job in jobs), _THREADS
        )
        for k in range(len(leaf.chunks)):
            leaf.write(k, {shard.devices[0]: next(reads) for shard in leaf.shards})
