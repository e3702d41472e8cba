"""What a checksum notices."""

import numpy as np
import pytest

from zerojax.offload.disk.checksum import checksum


@pytest.mark.parametrize("n", [1, 511, 512, 513, 2**18 + 700])
def test_every_bit_counts(n: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, n, np.uint8)
    right = checksum(data)
    for at in {0, n // 2, n - 1}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert checksum(data) != right
            data[at] ^= 1 << bit
    assert checksum(data) == right
    assert checksum(data[:-1]) != right
    assert checksum(np.append(data, np.uint8(0))) != right


@pytest.mark.parametrize("size", [8, 512, 4096, 2**18])
def test_order_counts(size: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2**19, np.uint8)
    swapped = np.concatenate([data[size : 2 * size], data[:size], data[2 * size :]])
    assert checksum(swapped) != checksum(data)


def test_it_does_not_matter_where_it_lies() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5001, np.uint8)
    assert checksum(data[1:]) == checksum(data[1:].copy())
