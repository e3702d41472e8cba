"""How a line of elements is cut among the threads of a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
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

    @property
    def layout(self) -> Any:
        """How its elements are spread over the threads."""
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)


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


class Cut(NamedTuple):
    """A line in blocks of ``strip`` elements; the last block takes what is left, too.

    Attributes:
      length: of the line.
      strip: a multiple of ``largest``.
      largest, vector: see :func:`tiles`.
    """

    length: int
    strip: int
    largest: int
    vector: int

    @property
    def blocks(self) -> int:
        """How many there are."""
        return max(1, self.length // self.strip)


def of_block(cuts: Sequence[Cut], block: Any, work: Callable[[int, list[Tile]], None]) -> None:
    """``work(k, tiles)`` for the tiles that a block has, of line ``k``; lines come one after
    another, and each block has a part of one."""
    first = 0
    for k, cut in enumerate(cuts):
        _of_line(cut, first, block, functools.partial(work, k))
        first += cut.blocks


def _of_line(cut: Cut, first: int, block: Any, work: Callable[[list[Tile]], None]) -> None:
    def some(length: int, begin: Any) -> None:
        found = tiles(length, cut.largest, cut.vector)
        work([tile._replace(start=begin + tile.start) for tile in found])

    last = first + cut.blocks - 1
    begin = (cut.blocks - 1) * cut.strip
    if cut.blocks > 1:
        inside = (first <= block) & (block < last)
        pl.when(inside)(lambda: some(cut.strip, (block - first) * cut.strip))
    pl.when(block == last)(lambda: some(cut.length - begin, begin))


def rows(x: Any) -> Any:
    """[rows, width], None of None; bytes for bool."""
    if x is None:
        return None
    return (x.astype(jnp.int8) if x.dtype == jnp.bool else x).reshape(-1, x.shape[-1])


def load(ref: Any, at: tuple[Any, ...], tile: Tile) -> Any:
    """A tile of the line ``ref[at]``, in registers."""
    return compat.laid_out(ref[(*at, pl.ds(tile.start, tile.size))], tile.layout)


def places(tile: Tile) -> Any:
    """int32 [size], 0, 1, 2 and so on."""
    return compat.laid_out(lax.broadcasted_iota("int32", (tile.size,), 0), tile.layout)


def fresh(tile: Tile) -> Any:
    """bool [size], elements that no tile before has; None where that is all of them."""
    return lax.ge(places(tile), tile.again) if tile.again else None


def params(**changes: Any) -> plgpu.CompilerParams:
    """Of every kernel here. Mosaic's barriers around stores stay: where a result is written over
    an argument, they alone keep the reads before the writes."""
    return plgpu.CompilerParams(lowering_semantics=LoweringSemantics.Warpgroup, **changes)
