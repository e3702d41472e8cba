"""Rates of the disk for the offloaded state, beside plain sequential reads and writes of one file.

    python -m benchmarks.disk_rate [nvme_path] [--gigabytes 2] [--block-megabytes 16]
    python -m benchmarks.disk_rate /local_nvme --record benchmarks/records

Exits with 1 where the store has less than ``LEAST`` of the plain rate.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from benchmarks.checkpoint_times import drop_caches
from benchmarks.frame import Answer, Table, argument, question
from zerojax.offload.disk.store import DiskStore

LEAST = 0.8  # of the plain rate
TURNS = 5
ORDERS = (
    ("store_write", "plain_write", "store_read", "plain_read"),
    ("plain_write", "store_write", "plain_read", "store_read"),
)
"""Orders within a turn, as the second finds the disk as the first has left it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """MB/s of each turn; where ``cold``, no file is in memory when the turn begins.

    The plain rates are those of ``os.write`` and ``os.readv`` of the same blocks in one file, one
    after the other. A turn's writes are over when the disk has all of it.
    """

    cold: bool
    store_write: list[float]
    store_read: list[float]
    plain_write: list[float]
    plain_read: list[float]

    @property
    def write(self) -> float:
        """The store's over the plain rate: the median over turns, in which neighbours compare."""
        return _ratio(self.store_write, self.plain_write)

    @property
    def read(self) -> float:
        return _ratio(self.store_read, self.plain_read)

    def missed(self) -> list[str]:
        """The ways on which the store has less than ``LEAST``."""
        ratios = {"write": self.write, "read": self.read}
        return [f"{way}: {r:.2f} of {LEAST}" for way, r in ratios.items() if not r >= LEAST]

    def rows(self) -> list[list[str]]:
        """A table of medians."""
        ways = {
            "write": (self.store_write, self.plain_write, self.write),
            "read": (self.store_read, self.plain_read, self.read),
        }
        return [["way", "store MB/s", "plain MB/s", "ratio", "at least"]] + [
            [way, *(f"{statistics.median(x):.0f}" for x in rates), f"{ratio:.2f}", f"{LEAST}"]
            for way, (*rates, ratio) in ways.items()
        ]


def measure(
    nvme_path: str | os.PathLike[str],
    *,
    nbytes: int = 2 * 10**9,
    block_bytes: int = 16 * 2**20,
    buffer_count: int = 4,
    turns: int = TURNS,
) -> Rates:
    """Reads and writes the same blocks through a :class:`DiskStore` and plainly, turn by turn."""
    count = max(1, nbytes // block_bytes)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, block_bytes, np.uint8) for _ in range(min(count, 4))]
    blocks = [data[i % len(data)] for i in range(count)]
    rates: dict[str, list[float]] = {}
    cold = True
    with (
        DiskStore(nvme_path, buffer_count=buffer_count) as store,
        tempfile.NamedTemporaryFile(dir=nvme_path) as plain,
    ):
        store.reserve(2 * count * block_bytes)
        acts: dict[str, Callable[[], None]] = {
            "store_write": lambda: _store_write(store, blocks),
            "plain_write": lambda: _plain_write(plain.name, blocks),
            "store_read": lambda: _store_read(store, count, buffer_count),
            "plain_read": lambda: _plain_read(plain.name, count, block_bytes),
        }
        for turn in range(turns):
            for name in ORDERS[turn % 2]:
                cold &= drop_caches()
                _touch(2 * count * block_bytes)
                begin = time.perf_counter()
                acts[name]()
                seconds = time.perf_counter() - begin
                rates.setdefault(name, []).append(count * block_bytes / 1e6 / seconds)
    return Rates(cold=cold, **rates)


def _store_write(store: DiskStore, blocks: list[np.ndarray]) -> None:
    for i, block in enumerate(blocks):
        store.write(str(i), block)
    store.wait()
    _sync(store.path)


def _store_read(store: DiskStore, count: int, ahead: int) -> None:
    reads: deque[Future[np.ndarray]] = deque()
    for i in range(count):
        if len(reads) == ahead:
            reads.popleft().result()
        reads.append(store.read(str(i)))
    for read in reads:
        read.result()


def _plain_write(path: str, blocks: list[np.ndarray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for block in blocks:
            file.write(block.data)
        os.fdatasync(file.fileno())


def _plain_read(path: str, count: int, block_bytes: int) -> None:
    buffer = np.empty(block_bytes, np.uint8)
    with open(path, "rb", buffering=0) as file:
        for _ in range(count):
            file.readinto(buffer.data)


def _sync(folder: Path) -> None:
    for path in folder.glob("0*"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())


def _touch(nbytes: int) -> None:
    """Takes memory and frees it, so that neither of the two that are compared has to wait for it.

    A virtual machine gives free memory back within seconds; whoever needs it first then waits for
    it, five times as long as for the disk.
    """
    np.ones(nbytes, np.uint8)


def _ratio(store: list[float], plain: list[float]) -> float:
    return statistics.median(s / p for s, p in zip(store, plain, strict=True))


def answer(rates: Rates, gigabytes: float, block_megabytes: int) -> Answer:
    reads = "with nothing of it in memory" if rates.cold else "perhaps from the page cache"
    note = (
        f"{gigabytes:g} GB in blocks of {block_megabytes} MiB, written until the disk has them, "
        f"and read {reads};\nmedians of {len(rates.store_read)} turns, the ratio within each turn."
    )
    figures = dataclasses.asdict(rates)
    return Answer(figures, [note, Table(rates.rows())], missed=rates.missed())


@question(
    "disk",
    "Disk rates under offload",
    argument("nvme_path", nargs="?", default=tempfile.gettempdir()),
    argument("--gigabytes", type=float, default=2),
    argument("--block-megabytes", type=int, default=16),
    argument("--buffer-count", type=int, default=4),
)
def main(options: argparse.Namespace) -> Answer:
    rates = measure(
        options.nvme_path,
        nbytes=int(options.gigabytes * 1e9),
        block_bytes=options.block_megabytes * 2**20,
        buffer_count=options.buffer_count,
    )
    return answer(rates, options.gigabytes, options.block_megabytes)


if __name__ == "__main__":
    main()
