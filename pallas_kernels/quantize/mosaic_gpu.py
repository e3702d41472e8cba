"""Blockwise quantisation in one pass over memory, for NVIDIA GPUs.

A warp processes a block: five exchanges between the warp's threads find the largest element, and
no thread waits for another warp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, tiles
from pallas_kernels.quantize import reference

WARPS, LANES = 4, 32
SMALLEST = WARPS
"""Minimum number of blocks: one per warp."""
LONGEST = 2048
"""Maximum elements of a block, of which a thread holds 64."""
AT_ONCE = 32
"""Number of elements that a thread reads before it waits for any of them."""


def fits(blocks: int, block_size: int) -> bool:
    """Returns whether the kernels support this number and size of blocks."""
    return blocks >= SMALLEST and block_size <= LONGEST


def _layout(width: int, *dtypes: Any) -> Any:
    """Returns the layout of [4, width]: row i in warp i, up to 16 adjacent bytes per thread."""
    vector = math.gcd(16 // max(jnp.dtype(d).itemsize for d in dtypes), width // LANES)
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _launch(
    name: str,
    work: Callable[..., None],
    inputs: list[jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    block_size: int,
) -> list[jax.Array]:
    """Runs ``work(starts, refs)``; the tiles of 4 blocks at the starts cover all blocks.

    ``work`` must load the tiles of a call together. The last tile overlaps the tile before if the
    number of blocks, the first dimension of all arrays, is not a multiple of 4.
    """
    blocks = inputs[0].shape[0]
    groups_at_once = max(1, AT_ONCE * LANES // block_size)
    blocks_per_program = groups_at_once * WARPS
    programs = max(1, blocks // blocks_per_program)

    def body(*refs: Any) -> None:
        program = lax.axis_index("program")

        def run_range(begin: Any, count: int) -> None:
            starts = [*range(0, count - WARPS + 1, WARPS)]
            starts += [count - WARPS] if count % WARPS else []
            for i in range(0, len(starts), groups_at_once):
                work([begin + start for start in starts[i : i + groups_at_once]], refs)

        if programs > 1:
            pl.when(program < programs - 1)(
                lambda: run_range(program * blocks_per_program, blocks_per_program)
            )
        begin = (programs - 1) * blocks_per_program
        pl.when(program == programs - 1)(lambda: run_range(begin, blocks - begin))

    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=outputs,
        grid=(programs,),
        grid_names=("program",),
        compiler_params=tiles.params(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )(*inputs)


def quantize(x: jax.Array, noise: jax.Array | None, bits: int) -> tuple[jax.Array, jax.Array]:
    """Computes :func:`reference.quantize` for blocks [blocks, block_size]."""
    blocks, size = x.shape
    width = size * bits // 8
    arrays = [x] if noise is None else [x, noise]
    layout = _layout(width, *(a.dtype for a in arrays))

    def work(starts: list[Any], refs: Any) -> None:
        *ins, codes, scales = refs
        loaded = [
            [
                [compat.load(r, (pl.ds(start, WARPS), pl.ds(i, width)), layout) for r in ins]
                for i in range(0, size, width)
            ]
            for start in starts
        ]
        for start, halves in zip(starts, loaded, strict=True):
            rows = pl.ds(start, WARPS)
            values, drawn = [h[0] for h in halves], [h[1] for h in halves if len(h) > 1]
            code, scale = reference.quantize(values, drawn, bits)
            compat.store(codes, (rows, pl.ds(0, width)), code)
            compat.store(scales, (rows,), scale)

    outputs = [
        jax.ShapeDtypeStruct((blocks, width), jnp.int8),
        jax.ShapeDtypeStruct((blocks,), jnp.float32),
    ]
    codes, scales = _launch("quantize_blockwise", work, arrays, outputs, size)
    return codes, scales


def dequantize(codes: jax.Array, scales: jax.Array, bits: int, dtype: Any) -> jax.Array:
    """Computes :func:`reference.dequantize`, with the parts concatenated and cast."""
    blocks, width = codes.shape
    size = width * 8 // bits
    layout = _layout(width, dtype)

    def work(starts: list[Any], refs: Any) -> None:
        codes, scales, out = refs
        loaded = [
            (
                compat.load(codes, (pl.ds(start, WARPS), pl.ds(0, width)), layout),
                compat.load(scales, (pl.ds(start, WARPS),), layout.reduce(1)),
            )
            for start in starts
        ]
        for start, (code, scale) in zip(starts, loaded, strict=True):
            for i, x in enumerate(reference.dequantize(code, scale, bits)):
                index = pl.ds(start, WARPS), pl.ds(i * width, width)
                compat.store(out, index, x.astype(out.dtype))

    outputs = [jax.ShapeDtypeStruct((blocks, size), dtype)]
    return _launch("dequantize_blockwise", work, [codes, scales], outputs, size)[0]
