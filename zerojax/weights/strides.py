"""Strided boxes of elements in a file, split into bands of bounded size and contiguous runs.

>>> runs((2, 3), (8, 1))                     # two rows of three, in a tensor of eight columns
(3, array([0, 8]))
>>> [*bands((4, 1000), 4, limit=8000)]
[(slice(0, 2, None),), (slice(2, 4, None),)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

BAND_BYTES = 2**18  # stays in a core's cache while it is transposed


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of an array in C order, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, np.ndarray]:
    """Returns the length and the offsets of a box's contiguous runs, in elements and C order."""
    length, axis = 1, len(shape)
    while axis and (shape[axis - 1] == 1 or strides[axis - 1] == length):
        length *= shape[axis - 1]
        axis -= 1
    offsets = np.zeros(1, np.int64)
    for n, stride in zip(shape[:axis], strides, strict=False):
        offsets = (offsets[:, None] + stride * np.arange(n, dtype=np.int64)).ravel()
    return length, offsets


def bands(
    shape: Sequence[int], itemsize: int, limit: int = BAND_BYTES
) -> Iterator[tuple[slice, ...]]:
    """Yields indices that split a box along leading dimensions into boxes of <= ``limit`` bytes."""
    if not shape or math.prod(shape) * itemsize <= limit:
        yield ()
        return
    rows = limit // (math.prod(shape[1:]) * itemsize)
    for i in range(0, shape[0], max(rows, 1)):
        inside = bands(shape[1:], itemsize, limit) if not rows else [()]
        yield from ((slice(i, min(i + max(rows, 1), shape[0])), *rest) for rest in inside)


def start(band: Sequence[slice], strides: Sequence[int]) -> int:
    """Returns the offset of a band's first element."""
    return sum(each.start * stride for each, stride in zip(band, strides, strict=False))
