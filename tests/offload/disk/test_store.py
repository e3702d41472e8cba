"""Blocks on a disk: what comes back, what is under way at once, and what is noticed."""

import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from groups import LIMIT

from zerojax.offload.disk import file as disk_file
from zerojax.offload.disk.folder import DiskError
from zerojax.offload.disk.store import DiskStateError, DiskStore

MEGABYTES = 24
REMEDY = r"restore the last checkpoint \(Checkpointer.restore\)"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path, buffer_count=2) as store:
        yield store


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 5_000_001])
def test_a_block_comes_back(store: DiskStore, n: int) -> None:
    store.write("w", noise(n))
    np.testing.assert_array_equal(store.read("w").result(), noise(n))
    store.write("w", noise(n // 2, seed=1))
    np.testing.assert_array_equal(store.read("w").result(), noise(n // 2, seed=1))


class Held:
    """Data that is not to be had until it is let go, as that of a busy device."""

    nbytes = 8

    def __init__(self) -> None:
        self.wanted, self.free = threading.Event(), threading.Event()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.wanted.set()
        assert self.free.wait(LIMIT)
        return np.arange(8, dtype=np.uint8)


def test_a_read_waits_for_the_write_before_it(store: DiskStore) -> None:
    data = Held()
    store.write("w", data)
    assert data.wanted.wait(LIMIT)
    read = store.read("w")
    assert not wait([read], timeout=0.1).done
    data.free.set()
    np.testing.assert_array_equal(read.result(), np.arange(8))


def test_no_more_writes_than_buffers(store: DiskStore) -> None:
    data = [Held() for _ in range(3)]
    issued = threading.Event()

    def write_all() -> None:
        for i, held in enumerate(data):
            store.write(str(i), held)
        issued.set()

    thread = threading.Thread(target=write_all)
    thread.start()
    assert data[0].wanted.wait(LIMIT)
    assert data[1].wanted.wait(LIMIT)
    assert not issued.wait(0.1)
    assert not data[2].wanted.is_set()
    data[0].free.set()
    assert issued.wait(LIMIT), "the third was to go on when the oldest was done"
    assert data[2].wanted.wait(LIMIT)
    for held in data:
        held.free.set()
    thread.join()
    store.wait()


def test_what_was_read_is_the_callers_alone(store: DiskStore) -> None:
    """So that host memory holds what is under way, and nothing of the state besides."""
    store.write("w", noise(1000))
    read = store.read("w").result()
    store.wait()
    held = weakref.ref(read)
    del read
    gc.collect()
    assert held() is None


def flip(file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    data[70_000] ^= 16
    file.write_bytes(data)


def cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def swap_files(file: Path, other: Path) -> None:
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def remove(file: Path, other: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [flip, cut, swap_files, remove])
def test_damage_is_noticed(store: DiskStore, damage: Callable[[Path, Path], None]) -> None:
    store.write("mu.w, piece 0", noise(100_000))
    store.write("nu.w, piece 0", noise(100_000, seed=1))
    store.wait()
    file, other = sorted(store.path.glob("0*"))
    damage(file, other)
    with pytest.raises(DiskStateError, match=rf"{file}, .* mu\.w, piece 0, .*{REMEDY}"):
        store.read("mu.w, piece 0").result()


def full_disk(path: Path, data: np.ndarray) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write_too_much(store: DiskStore) -> None:
    for i in range(MEGABYTES):
        store.write(f"k{i}", noise(2**20, seed=i))
    store.wait()


def test_a_full_disk(
    small_disk: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path, buffer_count=2) as store:
        store.write("first", noise(2**20))
        store.wait()
        if small_disk is None:
            monkeypatch.setattr(disk_file, "write", full_disk)
        with pytest.raises(
            DiskStateError, match=rf"{store.path}.*of k\d.* free\).*{REMEDY}"
        ) as told:
            write_too_much(store)
        assert "space" in str(told.value).lower()
        monkeypatch.undo()
        for act in (lambda: store.read("first"), lambda: store.write("x", noise(1)), store.wait):
            with pytest.raises(DiskStateError, match=REMEDY):
                act()
    assert not [*tmp_path.iterdir()]


def test_too_small_a_disk_is_told_before(store: DiskStore) -> None:
    store.reserve(1)
    with pytest.raises(DiskError, match=r"has .* GB free, and the state needs 1000000000.00 GB: "):
        store.reserve(10**18)
