"""Blocks of a few bits and a scale, in which parameters and gradients are sent (ZeRO++).

codes, scales = quantize(x, extents((512, 4096), None), "int8")
y = dequantize(codes, scales, "int8", x.shape, x.dtype)     # x within half a scale
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.plan.quantized import Format

LARGEST: dict[str, float] = {"int8": 127, "int4": 7, "float8_e4m3fn": 448}
"""The largest code of a format; the smallest is minus that."""

_TINY = float(jnp.finfo(jnp.float32).tiny)


def quantize(x: jax.Array, block: Sequence[int], format: Format) -> tuple[jax.Array, jax.Array]:
    r"""An array in codes, each block scaled by its largest element.

    .. math::

        s = \max_i |x_i| / q, \quad c_i = \operatorname{round}(x_i / s)

    with the largest code :math:`q`, in float32. Source: ZeRO++, arXiv:2306.10209, and DeepSpeed's
    ``quantize.cu`` (symmetric). A block of zeros, or of a denormal scale, becomes zeros. The scale
    of a block with an infinity or NaN is NaN, and so is all of the block behind
    :func:`dequantize`.

    Args:
      x: Floats.
      block: The extent of a block in each dimension, which divides that of ``x``.
      format: Of the codes.

    Returns:
      Codes like ``x``, those of int4 in pairs (uint8, half the last dimension of a block), and
      scales, float32, one a block.
    """
    parts = _blocks(x.astype(jnp.float32), block)
    within = tuple(range(1, parts.ndim, 2))
    scales = jnp.max(jnp.abs(parts), axis=within, keepdims=True) * (1 / LARGEST[format])
    scales = jnp.where(scales < _TINY, 0.0, scales)  # NaN is not less
    scales = jnp.where(scales == jnp.inf, jnp.nan, scales)
    codes = parts * jnp.where(scales > 0, 1 / scales, 0.0)
    most = LARGEST[format]
    codes = jnp.clip(codes if format == "float8_e4m3fn" else jnp.round(codes), -most, most)
    if format == "int4":
        low, high = jnp.split(codes.astype(jnp.int32) & 15, 2, axis=-1)
        made = (low | (high << 4)).astype(jnp.uint8)
    else:
        made = codes.astype(format)
    return _together(made), scales.reshape(scales.shape[::2])


def dequantize(codes: jax.Array, scales: jax.Array, format: Format, dtype: Any) -> jax.Array:
    """The array again, in ``dtype``, from what :func:`quantize` returns."""
    block = [n // k for n, k in zip(codes.shape, scales.shape, strict=True)]
    parts = _blocks(codes, block)
    if format == "int4":
        both = parts.astype(jnp.int32)
        # The sign of four bits comes down from the top.
        halves = [(both << 28) >> 28, (both << 24) >> 28]
        parts = jnp.concatenate(halves, axis=-1)
    by = scales.reshape([size for n in scales.shape for size in (n, 1)])
    # On CPUs without AVX-512 XLA has wrong numbers for such a product of eight dimensions.
    ones = tuple(i for i, n in enumerate(parts.shape) if n == 1)
    product = parts.squeeze(ones).astype(jnp.float32) * by.squeeze(ones)
    return _together(product.astype(dtype).reshape(parts.shape))


def _blocks(x: jax.Array, block: Sequence[int]) -> jax.Array:
    """[n, block, ...] of each dimension [n * block]."""
    return x.reshape([k for n, b in zip(x.shape, block, strict=True) for k in (n // b, b)])


def _together(parts: jax.Array) -> jax.Array:
    sizes = zip(parts.shape[::2], parts.shape[1::2], strict=True)
    return lax.reshape(parts, [n * b for n, b in sizes])
