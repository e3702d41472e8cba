"""Split of a line of elements among the threads of a GPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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


def vector_of(itemsize: int, *strides: int) -> int:
    """Returns the number of elements that a thread can access at once, up to 16 bytes.

    Lines begin at multiples of ``strides`` elements.
    """
    max_elements = 16 // itemsize
    return math.gcd(max_elements, *strides)


def rows(x: Any) -> Any:
    """Reshapes x to [rows, width]; returns None for None."""
    return None if x is None else x.reshape(-1, x.shape[-1])


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
    """Returns the compiler parameters of all kernels."""
    return plgpu.CompilerParams(lowering_semantics=LoweringSemantics.Warpgroup, **changes)
