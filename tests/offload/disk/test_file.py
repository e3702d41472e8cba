"""Files that arrays fill, and what their checksum notices."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from zerojax.offload.disk import file as disk_file


def test_the_system_takes_and_gives_less_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does beyond 2 GB."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:4096]], at))
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    disk_file.write(tmp_path / "0", data)
    np.testing.assert_array_equal(disk_file.read(tmp_path / "0", 10_000), data)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="it ends at byte 0 of 10000"):
        disk_file.read(tmp_path / "0", 10_000)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("n", [4095, 4096, 100_001])
def test_whatever_the_file_system_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, direct: bool
) -> None:
    """Some have no O_DIRECT."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    if not direct:
        monkeypatch.setattr(os, "open", refuse)
    data = np.random.default_rng(0).integers(0, 256, n, np.uint8)
    disk_file.write(tmp_path / "0", data)
    np.testing.assert_array_equal(disk_file.read(tmp_path / "0", n), data)


@pytest.mark.parametrize("n", [1, 511, 512, 513, 2**18 + 700])
def test_every_bit_counts(n: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, n, np.uint8)
    right = disk_file.checksum(data)
    for at in {0, n // 2, n - 1}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert disk_file.checksum(data) != right
            data[at] ^= 1 << bit
    assert disk_file.checksum(data) == right
    assert disk_file.checksum(data[:-1]) != right
    assert disk_file.checksum(np.append(data, np.uint8(0))) != right
