"""Definition of blockwise quantisation in plain JAX.

A block of 4-bit codes has two parts, its halves: byte i has element i in its low bits and element
i + block_size / 2 in its high bits. So no code has to move between the threads of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LIMIT = {8: 127, 4: 7}
"""Largest code by number of bits; the smallest code is its negative."""
_TINY = float(jnp.finfo(jnp.float32).tiny)


def parts(x: Any, bits: int) -> list[Any]:
    """Returns the complete blocks [blocks, block_size], or their halves for 4 bits."""
    if bits == 8:
        return [x]
    half = x.shape[1] // 2
    return [x[:, :half], x[:, half:]]


def quantize(values: Sequence[Any], noise: Sequence[Any], bits: int) -> tuple[Any, Any]:
    """Computes the formula of :func:`pallas_kernels.quantize_blockwise`, for any blocks.

    Args:
      values: parts of the blocks, floats [blocks, any].
      noise: uniform int16 like each part; or empty.
      bits: bits of a code, 8 or 4.

    Returns:
      Codes, int8 like a part, and scales, float32 [blocks].
    """
    values = [x.astype(jnp.float32) for x in values]
    largest = jnp.max(jnp.abs(values[0]), axis=1)
    for x in values[1:]:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
    scale = largest * jnp.float32(1 / LIMIT[bits])
    scale = jnp.where(scale < _TINY, jnp.zeros(scale.shape), scale)  # NaN is not less
    scale = jnp.where(scale == jnp.inf, jnp.full(scale.shape, jnp.nan), scale)
    is_positive = scale > 0
    inverse = jnp.where(
        is_positive, 1 / jnp.where(is_positive, scale, jnp.ones(scale.shape)), scale
    )
    codes = []
    for i, x in enumerate(values):
        factor = lax.broadcast_in_dim(inverse, x.shape, (0,))
        x = jnp.where(factor > 0, x * factor, jnp.zeros(x.shape))
        if noise:
            x = x + (noise[i].astype(jnp.float32) + 0.5) * (1 / 2**16)
        limit = jnp.full(x.shape, float(LIMIT[bits]))
        x = lax.clamp(-limit, lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), limit)
        codes.append(x.astype(jnp.int32))
    packed = codes[0] if bits == 8 else (codes[0] & 15) | (codes[1] << 4)
    return packed.astype(jnp.int8), scale


def dequantize(codes: Any, scale: Any, bits: int) -> list[Any]:
    """Computes the parts of the blocks, float32, see :func:`quantize`."""
    codes = codes.astype(jnp.int32)
    unpacked = [codes] if bits == 8 else [(codes << 28) >> 28, codes >> 4]
    factor = lax.broadcast_in_dim(scale, codes.shape, (0,))
    return [x.astype(jnp.float32) * factor for x in unpacked]


def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws uniform int16."""
    bits = jax.random.bits(key, shape, jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.int16)
