"""The folder of a run on the disk: where it cannot be, who else is there, and what is removed."""

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerojax.offload.disk.folder import DiskError, Folder
from zerojax.offload.disk.store import DiskStore


def as_nobody(folder: str) -> None:
    """The rest of the test below, in a process without root's rights."""
    if os.getuid() == 0:
        os.setuid(65534)
    with pytest.raises(DiskError, match=r"cannot be written \(Permission denied\): let this user"):
        Folder(folder)


def test_no_permission_to_write(open_to_all: Path) -> None:
    open_to_all.chmod(0o555)
    process = multiprocessing.get_context("forkserver").Process(
        target=as_nobody, args=(str(open_to_all),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def hold(parent: str, connection: Any) -> None:
    """A run that writes and never stops."""
    store = DiskStore(parent, buffer_count=2)
    connection.send(str(store.path))
    data = np.ones(2**20, np.uint8)
    while True:
        for i in range(8):
            store.write(str(i), data)


def test_two_runs_side_by_side_and_a_killed_one(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("forkserver").Process(
        target=hold, args=(str(tmp_path), theirs)
    )
    other.start()
    path = Path(ours.recv())
    with DiskStore(tmp_path, buffer_count=1) as store:
        assert store.path != path
        store.write("0", np.arange(10))
        np.testing.assert_array_equal(store.read("0").result().view(int), np.arange(10))
        assert path.exists(), "a living run's"
        other.kill()
        other.join()
        assert path.exists(), "nobody could remove it"
        with DiskStore(tmp_path, buffer_count=1) as third:
            assert {*tmp_path.iterdir()} == {store.path, third.path}
        np.testing.assert_array_equal(store.read("0").result().view(int), np.arange(10))
    assert not [*tmp_path.iterdir()]


def test_what_only_looks_like_a_runs_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "zerojax-checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "zerojax-notes").touch()
    Folder(tmp_path).remove()
    assert len([*tmp_path.iterdir()]) == 2
    assert (tmp_path / "zerojax-checkpoints" / "7").exists()


def test_it_goes_with_its_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, buffer_count=1)
    store.write("0", np.arange(10)).result()
    assert store.path.exists()
    del store
    gc.collect()
    assert not [*tmp_path.iterdir()]


def test_a_fork_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        folder.remove()
    assert folder.path.exists()
