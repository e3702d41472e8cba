"""Element-by-element functions of many arrays in one pass over memory, in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.tiles import Cut, Tile

PER_LAUNCH = 8
"""Maximum groups of arrays per launch: each has separate code in the kernel, and Mosaic's layout
inference fails on much more code. Equal launches are compiled once."""
SMALLEST = tiles.WARPGROUP
"""Minimum elements of an array."""

Function = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Function of scalars and arrays; static and hashed, so that equal functions share a compile."""


def elementwise(
    function: Function,
    scalars: jax.Array,
    groups: Sequence[Sequence[jax.Array]],
    dtypes: Sequence[Any],
    over: dict[int, int],
    *,
    name: str,
    run: int | None = None,
) -> list[list[jax.Array]]:
    """Computes ``[function(scalars, arrays) for arrays in groups]``.

    Args:
      function: a function of the scalars (float32 []) and one tile of each array of a group, in its
        dtype; its results are cast.
      scalars: float32 [k].
      groups: arrays of one size within a group, 128 elements or more; every group has the same
        number of arrays and the same dtypes.
      dtypes: the dtypes of the results.
      over: for a result, the array of the group that it overwrites if jax supports this.
      run: the index of a scalar that is 0 to skip the work; only if ``over`` has all results.

    Returns:
      The results of each group, in the shape of its first array.
    """
    settings = function, tuple(dtypes), tuple(over.items()), name, run
    by_size = sorted(range(len(groups)), key=lambda k: groups[k][0].size)
    results: dict[int, list[jax.Array]] = {}
    for first in range(0, len(groups), PER_LAUNCH):
        indices = by_size[first : first + PER_LAUNCH]
        outputs = _launch(*settings, scalars, [groups[k] for k in indices])
        results |= dict(zip(indices, outputs, strict=True))
    return [results[k] for k in range(len(groups))]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _launch(
    function: Function,
    dtypes: tuple[Any, ...],
    over: tuple[tuple[int, int], ...],
    name: str,
    run: int | None,
    scalars: jax.Array,
    groups: Sequence[Sequence[jax.Array]],
) -> list[list[jax.Array]]:
    flat = [[x.reshape(-1) for x in arrays] for arrays in groups]
    sizes = [arrays[0].size for arrays in flat]
    n_in, n_out = len(flat[0]), len(dtypes)
    itemsize = max(jnp.dtype(d).itemsize for d in (*dtypes, *(x.dtype for x in flat[0])))
    vector = tiles.vector_of(itemsize)
    largest = tiles.WARPGROUP * vector * 2
    cuts = [Cut(size, largest, largest, vector) for size in sizes]

    def body(values: Any, *refs: Any) -> None:
        block = lax.axis_index("block")
        scalar_values = [values[i] for i in range(scalars.size)]

        def work(k: int, block_tiles: Sequence[Tile]) -> None:
            ins = refs[k * n_in : (k + 1) * n_in]
            outs = refs[len(flat) * n_in + k * n_out :][:n_out]

            def read(tile: Tile) -> list[Any]:
                return [tiles.load(ref, (), tile) for ref in ins]

            def write(tile: Tile, arrays: Sequence[Any]) -> None:
                for ref, value in zip(outs, function(scalar_values, arrays), strict=True):
                    ref[pl.ds(tile.start, tile.size)] = value.astype(ref.dtype)

            # Tiles that overlap another tile of this block are read before that tile is written.
            overlapping = [(tile, read(tile)) for tile in block_tiles if tile.again]
            for tile in block_tiles:
                if not tile.again:
                    write(tile, read(tile))
            for tile, arrays in overlapping:
                write(tile, arrays)

        def all_groups() -> None:
            tiles.of_block(cuts, block, work)

        if run is not None and compat.IN_PLACE:
            pl.when(scalar_values[run] != 0)(all_groups)
        else:
            all_groups()

    outputs = [jax.ShapeDtypeStruct((size,), dtype) for size in sizes for dtype in dtypes]
    results = compat.launch(
        body,
        [scalars, *(x for arrays in flat for x in arrays)],
        outputs,
        {k * n_out + o: 1 + k * n_in + i for k in range(len(flat)) for o, i in over},
        grid=(sum(cut.blocks for cut in cuts),),
        grid_names=("block",),
        compiler_params=tiles.params(),
        kernel_name=name,
    )
    return [
        [x.reshape(arrays[0].shape) for x in results[k * n_out : (k + 1) * n_out]]
        for k, arrays in enumerate(groups)
    ]
