"""Sum of squares and finiteness of many leaves, each leaf read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat, tiles
from pallas_kernels.elementwise import PER_LAUNCH
from pallas_kernels.tiles import Cut, Tile

_STRIP = 8
"""Number of tiles that a block sums."""


def of_leaves(leaves: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of squares of all leaves, float32 [], and if all are finite, bool [].

    Each block writes a sum of squares, and a sum of :math:`x - x`: 0, or NaN if an ``x`` is not
    finite, even if the squares overflow.
    """
    by_size = sorted(leaves, key=lambda x: x.size)
    results = [
        _launch(by_size[first : first + PER_LAUNCH]) for first in range(0, len(leaves), PER_LAUNCH)
    ]
    sums, zeros = (jnp.concatenate(parts) for parts in zip(*results, strict=True))
    return jnp.sum(sums), jnp.sum(zeros) == 0


@jax.jit
def _launch(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    flat = [x.reshape(-1) for x in leaves]
    cuts = []
    for x in flat:
        vector = tiles.vector_of(x.dtype.itemsize)
        size = tiles.WARPGROUP * vector
        cuts.append(Cut(x.size, _STRIP * size, size, vector))
    blocks = sum(cut.blocks for cut in cuts)

    def body(*refs: Any) -> None:
        block = lax.axis_index("block")
        sums, zeros = refs[len(flat) :]
        tiles.of_block(
            cuts, block, lambda k, found: _store_sums(refs[k], found, sums, zeros, block)
        )

    out = jax.ShapeDtypeStruct((blocks,), jnp.float32)
    return compat.launch(
        body,
        flat,
        [out, out],
        {},
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=tiles.params(),
        kernel_name="grad_norm_finite",
    )


def _store_sums(ref: Any, found: Sequence[Tile], sums: Any, zeros: Any, block: Any) -> None:
    """Writes the block's two sums; adds tiles of the same shape before reducing over threads."""
    by_shape: dict[tuple[int, int], list[Any]] = {}
    for tile in found:
        x = tiles.load(ref, (), tile).astype(jnp.float32)
        fresh = tiles.fresh(tile)
        x = x if fresh is None else jnp.where(fresh, x, jnp.zeros_like(x))
        pair = [x * x, x - x]
        totals = by_shape.setdefault((tile.size, tile.vector), pair)
        if totals is not pair:
            by_shape[tile.size, tile.vector] = [a + b for a, b in zip(totals, pair, strict=True)]
    sums[block] = sum(jnp.sum(squares) for squares, _ in by_shape.values())
    zeros[block] = sum(jnp.sum(zero_sums) for _, zero_sums in by_shape.values())
