"""A file that holds one array and is overwritten in place, and a checksum of its bytes.

Tensorstore is not used: it writes a new file each time and renames the file, and reads into a
buffer that it then copies, which takes several times the processor time of the disk's own work.
"""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import numpy as np

_PAGE = 4096

_WORDS = 64
_BLOCK = 2**18
"""Bytes per step of the checksum: few enough to stay in the processor's cache."""

# The weights are odd, thus invertible modulo 2^64: if a word changes, so does its product.
_WEIGHTS = np.random.default_rng(0).integers(0, 2**64, _WORDS, np.uint64) | np.uint64(1)


def write(path: Path, data: np.ndarray) -> None:
    """Replaces the file's contents by uint8 [bytes]; on return the operating system has them."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        done = 0
        while done < data.size:
            # One call of Linux writes at most 2 GiB.
            done += os.pwrite(file, data[done:].data, done)
        # Cut behind the write, not before it, so that the file keeps its blocks on the disk.
        if os.fstat(file).st_size > done:
            os.ftruncate(file, done)
    finally:
        os.close(file)


def read(path: Path, nbytes: int) -> np.ndarray:
    """Reads a file as uint8 [bytes], past the page cache if the file system allows it.

    Raises:
      OSError: the file does not exist, or is shorter.
    """
    file = _open(path)
    try:
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


def checksum(data: np.ndarray) -> int:
    r"""Returns the CRC-32 of :math:`\sum_i k_i w_i \bmod 2^{64}` of each 64 words of uint8 [bytes].

    The checksum is as fast as memory. A change of one of the 64 words always changes their sum; a
    random change of more words changes the sum except with probability :math:`2^{-64}`.
    """
    total = 0
    for start in range(0, data.size, _BLOCK):
        block = data[start : start + _BLOCK]
        aligned_size = len(block) // (8 * _WORDS) * 8 * _WORDS
        words = block[:aligned_size].view(np.uint64).reshape(-1, _WORDS)
        total = zlib.crc32(words @ _WEIGHTS, total)
        total = zlib.crc32(block[aligned_size:], total)
    return total


def _open(path: Path) -> int:
    # Through the page cache a cold read takes three times the processor time.
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        # File systems without O_DIRECT, such as older versions of tmpfs.
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY)


def _pages(nbytes: int) -> np.ndarray:
    """Allocates at least ``nbytes``, page-aligned and in full pages."""
    # O_DIRECT needs aligned memory and sizes.
    size = -(-nbytes // _PAGE) * _PAGE
    data = np.empty(size + _PAGE, np.uint8)
    start = -data.ctypes.data % _PAGE
    return data[start : start + size]
