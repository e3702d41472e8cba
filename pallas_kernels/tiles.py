"""How a line of elements is cut among the threads of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

WARPGROUP = 128
"""Threads that work on a tile together; a tile has a multiple of as many elements."""


class Tile(NamedTuple):
    """Elements ``start`` to ``start + size`` of a line.

    Attributes:
      again: elements at its beginning that the tile before has, too.
      vector: elements next to each other that one thread takes at once.
    """

    start: Any
    size: int
    again: int
    vector: int


def tiles(length: int, largest: int, vector: int) -> Iterator[Tile]:
    """Cuts a line of at least 128 elements.

    No tile reaches beyond the end: the last one reaches back instead, where the length is no
    multiple of 128.

    Args:
      length: of the line.
      largest: elements of a tile, a multiple of ``128 * vector``.
      vector: see :class:`Tile`; a power of two.

    Example:
      >>> [tuple(tile) for tile in tiles(1200, 1024, 4)]
      [(0, 1024, 0, 4), (1024, 128, 0, 1), (1072, 128, 80, 1)]
    """
    start = 0
    while length - start >= WARPGROUP:
        size = min(largest, 2 ** int(math.log2(length - start)))
        yield Tile(start, size, 0, min(vector, size // WARPGROUP))
        start += size
    if start < length:
        yield Tile(length - WARPGROUP, WARPGROUP, start - (length - WARPGROUP), 1)


def vector_of(itemsize: int, *strides: int) -> int:
    """Elements that one thread can take at once, up to 16 bytes, if lines begin at multiples of
    ``strides`` elements."""
    most = 16 // itemsize
    return math.gcd(most, *strides)


def load(ref: Any, at: tuple[Any, ...], tile: Tile) -> Any:
    """A tile of the line ``ref[at]``, in registers."""
    layout = plgpu.Layout.WG_STRIDED((tile.size,), vec_size=tile.vector)
    return compat.laid_out(ref[(*at, pl.ds(tile.start, tile.size))], layout)


def fresh(tile: Tile) -> Any:
    """bool [size], elements that no tile before has; None where that is all of them."""
    if not tile.again:
        return None
    layout = plgpu.Layout.WG_STRIDED((tile.size,), vec_size=tile.vector)
    place = compat.laid_out(lax.broadcasted_iota("int32", (tile.size,), 0), layout)
    return lax.ge(place, tile.again)


def params(**changes: Any) -> plgpu.CompilerParams:
    """Of every kernel here. Mosaic's barriers around stores stay: where a result is written over
    an argument, they alone keep the reads before the writes."""
    return plgpu.CompilerParams(lowering_semantics=LoweringSemantics.Warpgroup, **changes)
