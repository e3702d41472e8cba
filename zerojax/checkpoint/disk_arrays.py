"""A state's arrays on a disk, written into a checkpoint and read back, a few pieces at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from zerojax.checkpoint.checksum import share
from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.pieces import Index, boxes, grid, moved, results, shape_of

CHUNK_BYTES = 64 * 2**20
"""The most bytes of a chunk in a checkpoint: a small shard reads small chunks."""

_TOGETHER = 128 * 2**20
"""Bytes written in one transaction; during it the next ones are read."""

_THREADS = 2


class DiskHandler(ocp.type_handlers.TypeHandler):
    """Writes :class:`DiskArray` as orbax writes NumPy arrays; orbax's own handler reads them.

    The next training step overwrites the arrays: :meth:`wait` before it.

    Attributes:
      sums: The checksums of the arrays written last, by orbax's name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self._writing: ocp.future.Future | None = None

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[DiskArray], infos: Sequence[Any], args: Any = None
    ) -> Sequence[ocp.future.Future]:
        # Orbax makes its folder first.
        self._writing = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write(values, infos), name="disk"
        )
        return [self._writing]

    def wait(self) -> None:
        """Returns when all arrays are in the checkpoint; raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    async def _write(self, values: Sequence[DiskArray], infos: Sequence[Any]) -> None:
        shares: dict[str, list[Future[int]]] = {}
        with ThreadPoolExecutor(_THREADS, "zerojax-checksum") as pool:
            transactions = _Transactions()
            for value, info in zip(values, infos, strict=True):
                await info.await_path_creation()
                shares[info.name] = [
                    pool.submit(share, block, [s.start for s in index])
                    for index, block in _written(value, info, transactions)
                ]
            transactions.finish()
        mine = {name: sum(x.result() for x in parts) for name, parts in shares.items()}
        self.sums = over_processes(mine)

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("orbax's own handler reads them")

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("orbax's own handler reads them")


class _Transactions:
    """Combines writes, as each transaction costs ocdbt a new root."""

    def __init__(self) -> None:
        self._bytes = 0
        self._open = tensorstore.Transaction(atomic=True)
        self._under_way: tuple[tensorstore.Transaction, list[Any]] | None = None
        self._staged: list[Any] = []

    def create(self, spec: Any, context: Any) -> None:
        """Creates an array."""
        tensorstore.open(
            spec, create=True, open=True, context=context, transaction=self._open
        ).result()

    def write(self, spec: Any, context: Any, index: Index, block: np.ndarray) -> None:
        """Writes a block, which must not change afterwards."""
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
            for one in staged:
                one.result()
        self._under_way = None

    def finish(self) -> None:
        """Returns when every write is committed."""
        self._send()
        self._settle()


def _written(
    x: DiskArray, info: Any, transactions: _Transactions
) -> Iterator[tuple[Index, np.ndarray]]:
    """Writes this process's chunks of an array, and yields the box and values of each."""
    chunk = chunk_of(x.shape, x.sharding, x.dtype.itemsize)
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
    shard_shape = x.sharding.shard_shape(x.shape)
    for i, shard in enumerate(x.leaf.shards):
        if shard.owner != jax.process_index():
            continue
        chunks = [*grid(shard_shape, chunk)]
        sizes = [math.prod(shape_of(box)) for box in chunks]
        # One piece is read ahead.
        starts = (functools.partial(x.leaf.read_shard, i, k) for k in range(len(x.leaf.pieces)))
        pieces = (read.view(x.dtype) for read in results(starts, 2))
        for box, flat in zip(chunks, recut(pieces, sizes), strict=True):
            index, block = moved(box, shard.box), flat.reshape(shape_of(box))
            transactions.write(spec, info.ts_context, index, block)
            yield index, block


def chunk_of(shape: tuple[int, ...], sharding: Sharding, itemsize: int) -> tuple[int, ...]:
    """The shape of a chunk: a run of a flat shard, so that every chunk is written once and whole.

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
    most = max(1, CHUNK_BYTES // itemsize)
    inner = next(d for d in range(len(shape)) if math.prod(shard[d + 1 :]) <= most)
    rows = max(1, min(shard[inner], most // math.prod(shard[inner + 1 :])))
    if shard[inner] != shape[inner]:  # each shard begins with a chunk of its own
        rows = next(n for n in range(rows, 0, -1) if shard[inner] % n == 0)
    return (*[1] * inner, rows, *shard[inner + 1 :])


def recut(pieces: Iterator[np.ndarray], sizes: Iterable[int]) -> Iterator[np.ndarray]:
    """A flat array, given piece by piece, in pieces of other sizes.

    Example:
      >>> import numpy as np
      >>> [*recut(iter(np.split(np.arange(6), 2)), [2, 4])]
      [array([0, 1]), array([2, 3, 4, 5])]
    """
    left: np.ndarray | None = None
    for size in sizes:
        parts: list[np.ndarray] = []
        while size:
            if left is None or not left.size:
                left = next(pieces)
            parts.append(left[:size])
            size, left = size - parts[-1].size, left[size:]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def over_processes(shares: Mapping[str, int]) -> dict[str, int]:
    """The checksums of whole arrays, from each process's shares."""
    if jax.process_count() == 1 or not shares:
        return {name: x % 2**32 for name, x in shares.items()}
    mine = np.array([x % 2**32 for x in shares.values()], np.uint32)
    every = np.asarray(multihost_utils.process_allgather(mine))
    return dict(zip(shares, map(int, every.sum(0, dtype=np.uint32)), strict=True))


def fill(leaf: DiskLeaf, read: Callable[[Index], np.ndarray]) -> int:
    """Writes all pieces of a leaf, and returns this process's share of the checksum.

    Args:
      leaf: The leaf.
      read: Returns a box of the whole array, in any float or integer dtype.
    """
    shape = leaf.sharding.shard_shape(leaf.shape)

    def read_piece(k: int, i: int) -> tuple[np.ndarray, int]:
        piece, shard = leaf.pieces[k], leaf.shards[i]
        flat, at, total = np.empty(len(piece), leaf.dtype), 0, 0
        for box in boxes(shape, piece.start, piece.stop):
            index = moved(box, shard.box)
            values = read(index)
            flat[at : at + values.size] = values.reshape(-1)
            at += values.size
            if shard.owner == jax.process_index():
                total += share(values, [s.start for s in index])
        return flat, total

    total = 0
    with ThreadPoolExecutor(_THREADS, "zerojax-restore") as pool:
        jobs = itertools.product(range(len(leaf.pieces)), range(len(leaf.shards)))
        reads = results(
            (functools.partial(pool.submit, read_piece, *job) for job in jobs), _THREADS
        )
        for k in range(len(leaf.pieces)):
            piece = {}
            for shard in leaf.shards:
                piece[shard.devices[0]], part = next(reads)
                total += part
            leaf.write(k, piece)
    return total
