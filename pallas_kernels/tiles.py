"""Split of a line of elements among the threads of a GPU."""

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
"""Number of threads that share a tile; the elements of a tile are a multiple of it."""


class Tile(NamedTuple):
    """Elements ``start`` to ``start + size`` of a line.

    Attributes:
      again: the number of elements at its start that are also in the tile before.
      vector: the number of adjacent elements that a thread accesses at once.
    """

    start: Any
    size: int
    again: int
    vector: int

    @property
    def layout(self) -> Any:
        """Distribution of the elements over the threads."""
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)


def tiles(length: int, largest: int, vector: int) -> Iterator[Tile]:
    """Splits a line of at least 128 elements into tiles.

    No tile exceeds the end: the last tile overlaps earlier ones instead if the length is not a
    multiple of 128.

    Args:
      length: elements of the line.
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
    """Returns the number of elements that a thread can access at once, up to 16 bytes.

    Lines begin at multiples of ``strides`` elements.
    """
    max_elements = 16 // itemsize
    return math.gcd(max_elements, *strides)


class Cut(NamedTuple):
    """Split of a line into blocks of ``strip`` elements; the last block also has the rest.

    Attributes:
      length: elements of the line.
      strip: elements of a block, a multiple of ``largest``.
      largest, vector: see :func:`tiles`.
    """

    length: int
    strip: int
    largest: int
    vector: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return max(1, self.length // self.strip)


def of_block(cuts: Sequence[Cut], block: Any, work: Callable[[int, list[Tile]], None]) -> None:
    """Runs ``work(k, tiles)`` for the tiles of a block, which belong to line ``k``.

    The blocks of a line follow those of the line before; each block has part of one line.
    """
    first = 0
    for k, cut in enumerate(cuts):
        _of_line(cut, first, block, functools.partial(work, k))
        first += cut.blocks


def _of_line(cut: Cut, first: int, block: Any, work: Callable[[list[Tile]], None]) -> None:
    def run(length: int, begin: Any) -> None:
        run_tiles = tiles(length, cut.largest, cut.vector)
        work([tile._replace(start=begin + tile.start) for tile in run_tiles])

    last_block = first + cut.blocks - 1
    begin = (cut.blocks - 1) * cut.strip
    if cut.blocks > 1:
        is_inner = (first <= block) & (block < last_block)
        pl.when(is_inner)(lambda: run(cut.strip, (block - first) * cut.strip))
    pl.when(block == last_block)(lambda: run(cut.length - begin, begin))


def rows(x: Any) -> Any:
    """Reshapes x to [rows, width], and bool to int8; returns None for None."""
    if x is None:
        return None
    return (x.astype(jnp.int8) if x.dtype == jnp.bool else x).reshape(-1, x.shape[-1])


def load(ref: Any, at: tuple[Any, ...], tile: Tile) -> Any:
    """Loads a tile of the line ``ref[at]`` into registers."""
    return compat.laid_out(ref[(*at, pl.ds(tile.start, tile.size))], tile.layout)


def places(tile: Tile) -> Any:
    """Returns 0, 1, 2, ..., int32 [size]."""
    return compat.laid_out(lax.broadcasted_iota("int32", (tile.size,), 0), tile.layout)


def fresh(tile: Tile) -> Any:
    """Returns which elements are in no earlier tile, bool [size]; None if all are."""
    return lax.ge(places(tile), tile.again) if tile.again else None


def params(**changes: Any) -> plgpu.CompilerParams:
    """Returns the compiler parameters of all kernels.

    By default Mosaic's barriers around stores are kept: if a result overwrites an argument, only
    they order the reads before the writes.
    """
    return plgpu.CompilerParams(lowering_semantics=LoweringSemantics.Warpgroup, **changes)
