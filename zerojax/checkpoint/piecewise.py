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
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.slices import (
    Index,
    boxes,
    full_index,
    grid,
    meet,
    moved,
    results,
    shape_of,
)
from zerojax.plan.places import PINNED
from zerojax.plan.stored import StoredArray, pad, unwrap_stored

CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of a chunk in a checkpoint; small shards then read small chunks."""

_TOGETHER = 128 * 2**20
"""Bytes written in one transaction; the next slices are read while the transaction commits."""

_THREADS = 2


class PiecewiseHandler(ocp.type_handlers.TypeHandler):
    """Writes :class:`DiskArray` and :class:`StoredArray` as orbax writes NumPy arrays; orbax's
    built-in handler reads them.

    ``serialize`` copies arrays that are in memory. The next training step overwrites arrays on a
    disk, so call :meth:`wait` before that step.

    Attributes:
      shares: This process's shares of the checksums of the disk arrays in the last write, by
        orbax's name.
    """

    def __init__(self) -> None:
        self.shares: dict[str, int] = {}
        self._writing: ocp.future.Future | None = None

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
        writing = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(arrays, infos), name="piecewise"
        )
        if any(array.on_disk for array in arrays):
            self._writing = writing
        return [writing]

    def wait(self) -> None:
        """Waits until the arrays on a disk are written; raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    async def _write(
        self, arrays: Sequence[_Array], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        shares: dict[str, list[Future[int]]] = {}
        with ThreadPoolExecutor(_THREADS, "zerojax-checksum") as pool:
            transactions = _Transactions()
            for array, info in zip(arrays, infos, strict=True):
                await info.await_path_creation()
                written = _write_chunks(array, info, transactions)
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
        self._under_way: tuple[tensorstore.Transaction, list[tensorstore.WriteFutures]] | None = (
            None
        )
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
        self._under_way = self._open, self._staged
        self._open.commit_async()
        self._open, self._staged, self._bytes = tensorstore.Transaction(atomic=True), [], 0

    def _settle(self) -> None:
        if self._under_way:
            transaction, staged = self._under_way
            transaction.future.result()
            for write_future in staged:
                write_future.result()
        self._under_way = None

    def finish(self) -> None:
        """Waits until every write is committed."""
        self._send()
        self._settle()


class _Shard(NamedTuple):
    """A shard to write.

    Attributes:
      box: Its indices in the array at rest.
      slices: Iterates over its values, flattened, in consecutive slices.
    """

    box: Index
    slices: Callable[[], Iterator[np.ndarray]]


class _Array(NamedTuple):
    """An array to write.

    Attributes:
      shape, padded: Its shape without padding, and its shape at rest.
      shards: The shards that this process writes.
      on_disk: Whether the shards are read from a disk; otherwise they are copies in host memory.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    shards: list[_Shard]
    on_disk: bool

    @classmethod
    def of(cls, x: DiskArray | StoredArray) -> _Array:
        """Describes ``x``; copies its shards to host memory unless they are on a disk."""
        at_rest = unwrap_stored(x)
        on_disk = isinstance(at_rest, DiskArray)
        shards = _disk_shards(at_rest) if on_disk else _host_shards(at_rest)
        return cls(x.shape, at_rest.shape, at_rest.dtype, at_rest.sharding, shards, on_disk)


def _disk_shards(x: DiskArray) -> list[_Shard]:
    def read_slices(i: int) -> Iterator[np.ndarray]:
        # Prefetches one slice.
        reads = (functools.partial(x.leaf.read_shard, i, k) for k in range(len(x.leaf.chunks)))
        return (read.view(x.dtype) for read in results(reads, 2))

    return [
        _Shard(shard.box, functools.partial(read_slices, i))
        for i, shard in enumerate(x.leaf.shards)
        if shard.owner == jax.process_index()
    ]


def _host_shards(x: jax.Array) -> list[_Shard]:
    own_shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    # A view of host memory would prevent the next step from donating the array.
    on_host = x.sharding.memory_kind == PINNED or any(
        s.device.platform == "cpu" for s in own_shards
    )
    for shard in () if on_host else own_shards:
        shard.data.copy_to_host_async()
    shards = []
    for shard in own_shards:
        box = (slice(*s.indices(n)[:2]) for s, n in zip(shard.index, x.shape, strict=True))
        flat = (np.array if on_host else np.asarray)(shard.data).reshape(-1)
        shards.append(_Shard(tuple(box), functools.partial(iter, [flat])))
    return shards


def _write_chunks(
    x: _Array, info: ocp.type_handlers.ParamInfo, transactions: _Transactions
) -> Iterator[tuple[Index, np.ndarray]]:
    """Writes this process's chunks of an array; yields the box and values of each."""
    chunk = chunk_of(x.padded, x.sharding, x.dtype.itemsize)
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=x.shape,
        local_shape=chunk,
        dtype=x.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
    )
    if jax.process_index() == 0:
        transactions.create(spec, info.ts_context)
    chunks = [*grid(x.sharding.shard_shape(x.padded), chunk)]
    sizes = [math.prod(shape_of(box)) for box in chunks]
    for shard in x.shards:
        for box, flat in zip(chunks, recut(shard.slices(), sizes), strict=True):
            index = moved(box, shard.box)
            if (inside := meet(index, full_index(x.shape))) is not None:
                block = flat.reshape(shape_of(box))[moved(inside, index, -1)]
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
    if not shape:
        return ()
    max_elements = max(1, most // itemsize)
    inner = next(d for d in range(len(shape)) if math.prod(shard[d + 1 :]) <= max_elements)
    rows = max(1, min(shard[inner], max_elements // math.prod(shard[inner + 1 :])))
    if shard[inner] != shape[inner]:  # no chunk may span two shards
        rows = next(n for n in range(rows, 0, -1) if shard[inner] % n == 0)
    return (*[1] * inner, rows, *shard[inner + 1 :])


def recut(slices: Iterator[np.ndarray], sizes: Iterable[int]) -> Iterator[np.ndarray]:
    """Re-splits a flat array, passed as consecutive slices, into slices of other sizes.

    Example:
      >>> import numpy as np
      >>> [*recut(iter(np.split(np.arange(6), 2)), [2, 4])]
      [array([0, 1]), array([2, 3, 4, 5])]
    """
    remaining: np.ndarray | None = None
    for size in sizes:
        parts: list[np.ndarray] = []
        while size:
            if remaining is None or not remaining.size:
                remaining = next(slices)
            parts.append(remaining[:size])
            size, remaining = size - parts[-1].size, remaining[size:]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def sum_shares(shares: Iterable[str]) -> dict[str, int]:
    """Sums the shares of all processes, passed as JSON, to the checksums of the full arrays.

    Example:
      >>> sum_shares(['{"w": 4294967295}', '{"w": 3}'])
      {'w': 2}
    """
    by_process = [json.loads(each) for each in shares]
    return {name: sum(each[name] for each in by_process) % 2**32 for name in by_process[0]}


def fill(leaf: DiskLeaf, shape: Sequence[int], read: Callable[[Index], np.ndarray]) -> int:
    """Writes all slices of a leaf to its disk; returns this process's share of the checksum.

    Args:
      leaf: The leaf to fill, padded or not.
      shape: The array's shape without padding.
      read: Returns a box of the unpadded array, in any float or integer dtype.
    """
    shard_shape = leaf.sharding.shard_shape(leaf.shape)

    def read_slice(k: int, i: int) -> tuple[np.ndarray, int]:
        block, shard = leaf.chunks[k], leaf.shards[i]
        flat, offset, total = np.empty(len(block), leaf.dtype), 0, 0
        for box in boxes(shard_shape, block.start, block.stop):
            size, index = math.prod(shape_of(box)), moved(box, shard.box)
            if (inside := meet(index, full_index(shape))) is None:
                flat[offset : offset + size] = 0
            else:
                values = read(inside)
                flat[offset : offset + size] = pad(values, shape_of(box)).reshape(-1)
                if shard.owner == jax.process_index():
                    total += share(values, [s.start for s in inside])
            offset += size
        return flat, total

    total = 0
    with ThreadPoolExecutor(_THREADS, "zerojax-restore") as pool:
        jobs = itertools.product(range(len(leaf.chunks)), range(len(leaf.shards)))
        reads = results(
            (functools.partial(pool.submit, read_slice, *job) for job in jobs), _THREADS
        )
        for k in range(len(leaf.chunks)):
            block = {}
            for shard in leaf.shards:
                block[shard.devices[0]], partial_sum = next(reads)
                total += partial_sum
            leaf.write(k, block)
    return total
