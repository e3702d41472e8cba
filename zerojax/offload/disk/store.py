"""Swap space of one run on a disk: blocks of bytes by key, written and read in the background.

A store is not a checkpoint: nothing is synced, the checksums are kept in memory, and the next run
removes the files that a killed run leaves on the disk.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self

import numpy as np

from zerojax.offload.disk import file as disk_file
from zerojax.offload.disk.folder import DiskError, Folder

RESTORE = "restore the last checkpoint (Checkpointer.restore)"


class DiskStateError(DiskError):
    """Error for a state on disk that is lost, damaged or half updated: restore a checkpoint."""


class Data(Protocol):
    """A NumPy or a JAX array."""

    @property
    def nbytes(self) -> int: ...

    def __array__(self) -> np.ndarray: ...


@dataclass
class _Block:
    """A key's file: its size and checksum, and the write and reads under way."""

    file: Path
    nbytes: int = 0
    checksum: int = 0
    write: Future[None] | None = None
    reads: set[Future[np.ndarray]] = field(default_factory=set)


class DiskStore:
    """Blocks of bytes in a new folder under ``nvme_path``.

    Args:
      nvme_path: A folder on the disk; runs may share it.
      buffer_count: The most blocks under way in each direction.

    Attributes:
      path: The folder of this store.

    Raises:
      DiskError: ``nvme_path`` does not exist, is not a folder, or cannot be written.

    Example:
      >>> import numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as disk, DiskStore(disk, buffer_count=2) as store:
      ...     _ = store.write("mu/0", np.arange(3.0))
      ...     store.read("mu/0").result().view(np.float64)
      array([0., 1., 2.])
    """

    def __init__(self, nvme_path: str | os.PathLike[str], *, buffer_count: int) -> None:
        self._folder = Folder(nvme_path)
        self.path: Path = self._folder.path
        self._blocks: dict[str, _Block] = {}
        self._writing: set[Future[None]] = set()
        self._room = threading.BoundedSemaphore(buffer_count)
        self._readers = ThreadPoolExecutor(buffer_count, "zerojax-read")
        self._writers = ThreadPoolExecutor(buffer_count, "zerojax-write")
        self._lock = threading.Lock()
        # Of Python's queues only this one may be used in finalizers: its put is reentrant.
        self._forgotten: SimpleQueue[Iterable[str]] = SimpleQueue()
        self._numbers = itertools.count()
        self._failed: str | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, nbytes: int) -> None:
        """Checks that the disk has room for ``nbytes`` more bytes.

        Raises:
          DiskError: the disk has less room.
        """
        wait(self._tidy())
        free = self._folder.free
        if nbytes > free:
            raise DiskError(
                f"{self.path.parent} has {_size(free)} free, and the state needs {_size(nbytes)}: "
                "free some space, or set nvme_path to another disk"
            )

    def write(self, key: str, data: Data) -> Future[None]:
        """Writes a block in the background, over the key's earlier block.

        Waits while ``buffer_count`` blocks are being written. The data is not copied and must not
        change until the write is done; data on a device is fetched in the background.

        Raises:
          DiskStateError: an earlier write failed.
        """
        self._tidy()
        # Before the block is queued, because a queue would hold any number of arrays in memory.
        self._room.acquire()
        try:
            self._check()
            with self._lock:
                if key not in self._blocks:
                    self._blocks[key] = _Block(self.path / f"{next(self._numbers):06}")
                block = self._blocks[key]
                before: list[Future[Any]] = [*block.reads]
                before += [block.write] if block.write else []
                future = self._writers.submit(self._write, key, block, data, before)
                block.write, block.reads = future, set()
                self._writing.add(future)
        except BaseException:
            self._room.release()
            raise
        # Outside the lock, which the callback takes: of a future that is done, it runs at once.
        future.add_done_callback(self._written)
        return future

    def read(self, key: str) -> Future[np.ndarray]:
        """Starts to read a block, uint8 [bytes], after the key's last write.

        ``buffer_count`` blocks are read at a time, others wait in turn. The future raises
        DiskStateError if the bytes are not those that were written.

        Raises:
          DiskStateError: an earlier write failed.
          KeyError: nothing was written for the key.
        """
        self._check()
        with self._lock:
            block = self._blocks[key]
            future = self._readers.submit(self._read, key, block, block.write)
            block.reads.add(future)
        # Outside the lock, as in write.
        future.add_done_callback(lambda read: self._was_read(block, read))
        return future

    def forget(self, keys: Iterable[str]) -> None:
        """Queues blocks for removal at the next :meth:`write`, :meth:`reserve` or :meth:`wait`.

        Takes no lock: finalizers call this method at any moment, also while their thread holds a
        lock of the store or of its threads.
        """
        self._forgotten.put(keys)

    def wait(self) -> None:
        """Waits until the operating system has every write.

        Raises:
          DiskStateError: a write failed.
        """
        removed = self._tidy()
        with self._lock:
            writing = set(self._writing)
        wait([*removed, *writing])
        self._check()

    def close(self) -> None:
        """Removes the folder, once no read or write is under way."""
        with self._lock:
            self._closed = True
        self._writers.shutdown()
        self._readers.shutdown()
        self._folder.remove()

    def _tidy(self) -> list[Future[None]]:
        """Removes forgotten blocks in the background, after their last read or write."""
        removed: list[Future[None]] = []
        while not self._closed:
            try:
                keys = self._forgotten.get_nowait()
            except Empty:
                break
            with self._lock:
                for block in [self._blocks.pop(key) for key in keys if key in self._blocks]:
                    before: list[Future[Any]] = [*block.reads]
                    before += [block.write] if block.write else []
                    removed.append(self._writers.submit(_remove, block.file, before))
        return removed

    def _check(self) -> None:
        if self._closed:
            raise DiskError(f"the store in {self.path} was closed")
        if self._failed:
            raise DiskStateError(self._failed)

    def _written(self, future: Future[None]) -> None:
        self._room.release()
        with self._lock:
            self._writing.discard(future)

    def _was_read(self, block: _Block, future: Future[np.ndarray]) -> None:
        with self._lock:  # only the caller keeps the bytes
            block.reads.discard(future)

    def _write(self, key: str, block: _Block, data: Data, before: list[Future[Any]]) -> None:
        # These futures were submitted earlier, so that none of them waits for this write.
        wait(before)
        try:
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            block.nbytes, block.checksum = flat.nbytes, disk_file.checksum(flat)
            disk_file.write(block.file, flat)
        except Exception as error:
            self._failed = self._failed or (
                f"{block.file}, of {key}, cannot be written ({_size(block.nbytes)}, "
                f"{_size(self._folder.free)} free): {error}. The state on disk is lost: free "
                f"space under {self.path.parent}, then {RESTORE}"
            )
            raise DiskStateError(self._failed) from error

    def _read(self, key: str, block: _Block, write: Future[None] | None) -> np.ndarray:
        if write:
            wait([write])
        self._check()
        try:
            flat = disk_file.read(block.file, block.nbytes)
            if disk_file.checksum(flat) != block.checksum:
                raise OSError("its checksum differs")
        except OSError as error:
            what = f"{block.file}, {_size(block.nbytes)} of {key}"
            raise DiskStateError(f"{what}, is damaged: {error}; {RESTORE}") from None
        return flat


def _remove(file: Path, before: list[Future[Any]]) -> None:
    wait(before)
    file.unlink(missing_ok=True)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"
