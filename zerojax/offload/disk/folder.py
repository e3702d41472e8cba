"""A folder for one run's scratch files, which the next run removes if this run could not."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
import weakref
from typing import NamedTuple

_PREFIX = "zerojax-"
_LOCK = ".zerojax-swap"


class DiskError(RuntimeError):
    """Error for a disk that cannot be used; the message states the path, reason and remedy."""


class Folder:
    """The folder ``PARENT/zerojax-*``, locked while this object or its process lives.

    Folders of dead runs in the same parent are removed.

    Attributes:
      path: Path of the folder.

    Raises:
      DiskError: the parent does not exist, is not a folder, or cannot be written.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        if not os.fspath(parent):
            raise DiskError("nvme_path is empty: name a folder on the disk")
        self._parent = pathlib.Path(parent).expanduser().absolute()
        try:
            claimed = None
            while claimed is None:
                claimed = _claim(self._parent)
        except OSError as error:
            raise DiskError(_unusable(self._parent, error)) from None
        self.path: pathlib.Path = claimed.path
        self._remove = weakref.finalize(self, _remove, *claimed, os.getpid())
        self._sweep()

    @property
    def free(self) -> int:
        """Free bytes on the disk."""
        return shutil.disk_usage(self.path).free

    def remove(self) -> None:
        """Removes the folder, and releases its lock."""
        self._remove()

    def _sweep(self) -> None:
        for other in self._parent.glob(f"{_PREFIX}*"):
            if other == self.path or not other.is_dir():
                continue
            try:
                lock = _locked(other / _LOCK, os.O_RDWR)
            except OSError:  # not such a folder, another user's, or just removed
                continue
            if lock is not None:
                _remove(other, lock, os.getpid())


class _Claimed(NamedTuple):
    """A claimed folder, and the descriptor of its locked file."""

    path: pathlib.Path
    lock: int


def _claim(parent: pathlib.Path) -> _Claimed | None:
    """Creates a folder; returns None if another run's sweep was faster than the lock."""
    path = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        lock = _locked(path / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError:
        path.rmdir()
        raise
    # Between the two calls, another run took the folder for a dead one's and removed it.
    if lock is not None and os.fstat(lock).st_nlink == 0:
        os.close(lock)
        return None
    return None if lock is None else _Claimed(path, lock)


def _locked(lock: pathlib.Path, flags: int) -> int | None:
    """Locks a file and returns its descriptor; None if the file is already locked."""
    file = os.open(lock, flags, 0o600)
    try:
        # The system releases the lock when the process ends, SIGKILL included.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _remove(folder: pathlib.Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the process must not remove the folder
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _unusable(parent: pathlib.Path, error: OSError) -> str:
    if not parent.exists():
        return f"nvme_path {parent} does not exist: make the folder, or mount the disk first"
    if not parent.is_dir():
        return f"nvme_path {parent} is a file: name a folder"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space" if is_full else "let this user write to it"
    return f"nvme_path {parent} cannot be written ({error.strerror}): {remedy}, or name another"
