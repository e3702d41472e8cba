"""Low-bit blocks with a scale, in which parameters and gradients are sent (ZeRO++).

codes, scales = quantize(x, extents((512, 4096), None), "int8")   # zerojax.plan.quantized.extents
y = dequantize(codes, scales, "int8", x.dtype)                    # x within half a scale
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zerojax.plan.quantized import Format

LARGEST: dict[str, float] = {"int8": 127, "int4": 7, "float8_e4m3fn": 448}
"""The largest code of a format; the smallest is minus that."""

_TINY = float(jnp.finfo(jnp.float32).tiny)


def quantize(x: jax.Array, block: Sequence[int], format: Format) -> tuple[jax.Array, jax.Array]:
    r"""Quantizes an array to codes, with each block scaled by its largest element.

    .. math::

        s = \max_i |x_i| / q, \quad c_i = \operatorname{round}(x_i / s)

    with the largest code :math:`q`, in float32. Source: ZeRO++, arXiv:2306.10209, and DeepSpeed's
    ``quantize.cu`` (symmetric). A block of zeros, or with a denormal scale, becomes zeros. A block
    that contains an infinity or NaN has a NaN scale, so that :func:`dequantize` returns NaN for all
    of the block.

    Args:
      x: A floating array.
      block: The extent of a block in each dimension, a divisor of that of ``x``.
      format: The format of the codes.

    Returns:
      Codes of the shape of ``x``, int4 codes in pairs (uint8, half the last dimension of a block),
      and scales, float32, one a block.
    """
    parts = _blocks(x.astype(jnp.float32), block)
    block_dims = tuple(range(1, parts.ndim, 2))
    scales = jnp.max(jnp.abs(parts), axis=block_dims, keepdims=True) * (1 / LARGEST[format])
    scales = jnp.where(scales < _TINY, 0.0, scales)  # NaN is not less
    scales = jnp.where(scales == jnp.inf, jnp.nan, scales)
    codes = parts * jnp.where(scales > 0, 1 / scales, 0.0)
    largest = LARGEST[format]
    codes = jnp.clip(codes if format == "float8_e4m3fn" else jnp.round(codes), -largest, largest)
    if format == "int4":
        low, high = jnp.split(codes.astype(jnp.int32) & 15, 2, axis=-1)
        packed = (low | (high << 4)).astype(jnp.uint8)
    else:
        packed = codes.astype(format)
    return _merged(packed), scales.reshape(scales.shape[::2])


def dequantize(codes: jax.Array, scales: jax.Array, format: Format, dtype: DTypeLike) -> jax.Array:
    """Returns the array, in ``dtype``, from the codes and scales of :func:`quantize`."""
    block = [n // k for n, k in zip(codes.shape, scales.shape, strict=True)]
    parts = _blocks(codes, block)
    if format == "int4":
        pairs = parts.astype(jnp.int32)
        # The arithmetic right shift extends the sign of the four bits.
        halves = [(pairs << 28) >> 28, (pairs << 24) >> 28]
        parts = jnp.concatenate(halves, axis=-1)
    factors = scales.reshape([size for n in scales.shape for size in (n, 1)])
    # XLA computes wrong numbers for such a product of eight dimensions on CPUs without AVX-512.
    ones = tuple(i for i, n in enumerate(parts.shape) if n == 1)
    product = parts.squeeze(ones).astype(jnp.float32) * factors.squeeze(ones)
    return _merged(product.astype(dtype).reshape(parts.shape))


def scale_of(largest: jax.Array, format: Format) -> jax.Array:
    """Returns the scale of the codes, float32, of an array whose largest element has this absolute
    value: the least power of two that is not below ``largest`` over the largest code. Powers of two
    are exact in every dtype, so that kernels which multiply codes compute what :func:`decode` and
    a product in bfloat16 do. NaN for an infinity or NaN, which makes all elements NaN."""
    scale = jnp.maximum(largest.astype(jnp.float32) / float(jnp.finfo(format).max), _TINY)
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    power = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, jnp.nan)


def encode(x: jax.Array, scale: jax.Array, format: Format) -> jax.Array:
    """Returns an array as fp8 codes with one scale."""
    largest = float(jnp.finfo(format).max)
    # Beyond the largest code the cast to e4m3 returns NaN.
    return jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(format)


def decode(codes: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the array, in ``dtype``, from :func:`encode`. XLA for GPUs multiplies the codes
    themselves where a product's operands have this form: a cast, times a number."""
    return codes.astype(dtype) * scale.astype(dtype)


def rounded(x: jax.Array, format: Format) -> jax.Array:
    """Returns an array rounded to fp8, with a scale from its largest element, in its own dtype."""
    scale = scale_of(jnp.max(jnp.abs(x)), format)
    return decode(encode(x, scale, format), scale, x.dtype)


def _blocks(x: jax.Array, block: Sequence[int]) -> jax.Array:
    """Splits each dimension [n * block] into [n, block]."""
    return x.reshape([k for n, b in zip(x.shape, block, strict=True) for k in (n // b, b)])


def _merged(parts: jax.Array) -> jax.Array:
    sizes = zip(parts.shape[::2], parts.shape[1::2], strict=True)
    return lax.reshape(parts, [n * b for n, b in sizes])
