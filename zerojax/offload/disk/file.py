"""A file that one array fills, written over in place.

Not through tensorstore: it writes a new file each time and renames it, and reads into a buffer
that it then copies, which takes several times the processor time of the disk's own work.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

_PAGE = 4096


def write(path: Path, data: np.ndarray) -> None:
    """Makes uint8 [bytes] the file's contents; with the operating system when it returns."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        done = 0
        while done < data.size:
            done += os.pwrite(file, data[done:].data, done)
        if os.fstat(file).st_size > done:
            os.ftruncate(file, done)
    finally:
        os.close(file)


def read(path: Path, nbytes: int) -> np.ndarray:
    """Its contents, uint8 [bytes], past the page cache where the file system lets us.

    Raises:
      OSError: it is not there, or of another size.
    """
    file = _opened(path)
    try:
        if (there := os.fstat(file).st_size) != nbytes:
            raise OSError(f"it has {there} bytes in place of {nbytes}")
        data = _pages(nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(file, [data[done:].data], done)
            if not got:
                raise OSError(f"it ends at byte {done} of {nbytes}")
            done += got
        return data[:nbytes]
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    # Through the page cache a cold read takes three times the processor time.
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY)


def _pages(nbytes: int) -> np.ndarray:
    """Whole pages for so many bytes, as ``O_DIRECT`` needs them."""
    size = -(-nbytes // _PAGE) * _PAGE
    data = np.empty(size + _PAGE, np.uint8)
    start = -data.ctypes.data % _PAGE
    return data[start : start + size]
