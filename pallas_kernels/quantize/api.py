"""Low-bit quantisation with one scale per block of numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.quantize import mosaic_gpu, reference

QUANTIZE = "quantize_blockwise"
DEQUANTIZE = "dequantize_blockwise"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["shape", "dtype", "bits"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array quantised in blocks to low-bit values; a pytree of two arrays.

    Attributes:
      values: int8 [blocks, block_size], or with 4 bits [blocks, block_size / 2]: byte i of a block
        has element i in its low bits and element i + block_size / 2 in its high bits.
      scales: float32 [blocks].
      shape, dtype: the shape and dtype of the original array.
      bits: 8 or 4.
    """

    values: jax.Array
    scales: jax.Array
    shape: tuple[int, ...]
    dtype: Any
    bits: int


def quantize_blockwise(
    x: jax.Array,
    *,
    bits: int = 8,
    block_size: int = 256,
    key: jax.Array | None = None,
    implementation: str | None = None,
) -> Quantized:
    r"""Quantises an array symmetrically, each block of it by its largest element.

    .. math::

        s = \max_i |x_i| / q, \quad v_i = \operatorname{round}(x_i / s), \quad
        q = 127 \text{ or } 7

    Sources: Dettmers et al., arXiv:2110.02861 (blocks); ZeRO++, arXiv:2306.10209 and DeepSpeed's
    ``quantize.cu`` (the communicated format). The computation is in float32. No gradient flows
    through it.

    A block of zeros, or of numbers so small that the scale would be denormal, gets the scale 0 and
    becomes zeros. A block with an infinity or NaN gets the scale NaN, so that all its elements are
    NaN after :func:`dequantize_blockwise`. If ``block_size`` does not divide the size, the last
    block is padded with zeros, which costs a copy of x.

    With ``"mosaic_gpu"``, XLA still handles fewer than 4 blocks and blocks of more than 2048
    elements, and ``jax.shard_map`` needs ``check_vma=False``. XLA draws the noise, 2 bytes per
    element. A code may differ by one from XLA's if x / s is halfway between two codes.

    Args:
      x: floats of any shape; read in row-major order.
      bits: bits of a value, 8 or 4.
      block_size: elements that share a scale; even for 4 bits, for ``"mosaic_gpu"`` a multiple of
        128.
      key: a key of :mod:`jax.random` for stochastic rounding, up or down so that the mean is x.
        None rounds to the nearest value, ties to even.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Raises:
      ValueError: x is empty, ``bits`` or ``block_size`` is invalid, or the implementation does not
        work on this device or with this ``block_size``.
      TypeError: x does not have a float dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> q = quantize_blockwise(jnp.array([0.5, -1.27, 1.0, 4.0]), block_size=2)
      >>> q.values, q.scales.round(4)
      (Array([[  50, -127],
             [  32,  127]], dtype=int8), Array([0.01  , 0.0315], dtype=float32))
    """
    x = jax.lax.stop_gradient(jnp.asarray(x))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{QUANTIZE}: x has dtype {x.dtype}; only floats are quantised")
    if x.size == 0:
        raise ValueError(f"{QUANTIZE}: x has shape {x.shape}; it has no elements")
    if bits not in reference.LIMIT:
        raise ValueError(f"{QUANTIZE}: bits is {bits}; it must be 8 or 4")
    if block_size < 1 or (bits == 4 and block_size % 2):
        raise ValueError(
            f"{QUANTIZE}: block_size is {block_size}; it must be positive, and even for 4 bits"
        )
    chosen = choose(QUANTIZE, implementation)
    if implementation == "mosaic_gpu" and block_size % 128:
        raise ValueError(
            f"{QUANTIZE}: block_size is {block_size}; 'mosaic_gpu' needs a multiple of 128. "
            "Choose one, or leave the implementation None."
        )
    blocks = math.ceil(x.size / block_size)
    flat = x.reshape(-1)
    if missing := blocks * block_size - x.size:
        flat = jnp.pad(flat, (0, missing))
    rows = flat.reshape(blocks, block_size)
    noise = None if key is None else reference.draw(key, rows.shape)
    if chosen == "mosaic_gpu" and mosaic_gpu.fits(blocks, block_size):
        values, scales = mosaic_gpu.quantize(rows, noise, bits)
    else:
        noise_parts = [] if noise is None else reference.parts(noise, bits)
        values, scales = reference.quantize(reference.parts(rows, bits), noise_parts, bits)
    return Quantized(values, scales, x.shape, x.dtype, bits)


def dequantize_blockwise(
    q: Quantized, dtype: Any = None, *, implementation: str | None = None
) -> jax.Array:
    r"""Inverts :func:`quantize_blockwise`, up to half a scale (one scale if stochastic).

    .. math::

        x_i = v_i s

    Sources, and the cases that XLA still handles, are as for :func:`quantize_blockwise`; with
    ``"mosaic_gpu"``, the block size must be a multiple of 128. Padding of the last block is
    removed, which costs a copy.

    Args:
      q: the blocks; its shape may be replaced (``dataclasses.replace``) by another of their size.
      dtype: a float dtype; None for the dtype of the original array.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      An array of shape ``[*q.shape]``.

    Raises:
      ValueError: values, scales and shape do not match; the implementation does not work on this
        device or with these blocks.
      TypeError: ``dtype`` is not a float dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> dequantize_blockwise(quantize_blockwise(jnp.array([0.5, -1.27, 1.0, 4.0]))).round(2)
      Array([ 0.5 , -1.26,  1.01,  4.  ], dtype=float32)
    """
    dtype = jnp.dtype(q.dtype if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{DEQUANTIZE}: dtype is {dtype}; it must be of floats")
    size, stored_size = math.prod(q.shape), q.values.size * 8 // q.bits
    if q.values.ndim != 2 or q.scales.shape != q.values.shape[:1] or not 0 < size <= stored_size:
        raise ValueError(
            f"{DEQUANTIZE}: values {q.values.shape} of {q.bits} bits and scales {q.scales.shape} "
            f"do not make an array {q.shape}; it takes [blocks, bytes of a block] and [blocks]"
        )
    blocks, block_size = q.values.shape[0], stored_size // q.values.shape[0]
    chosen = choose(DEQUANTIZE, implementation)
    is_supported = block_size % 128 == 0
    if implementation == "mosaic_gpu" and not is_supported:
        raise ValueError(
            f"{DEQUANTIZE}: the blocks have {block_size} elements; 'mosaic_gpu' needs a multiple "
            "of 128. Leave the implementation None."
        )
    values, scales = jax.lax.stop_gradient((q.values, q.scales))
    if chosen == "mosaic_gpu" and is_supported and mosaic_gpu.fits(blocks, block_size):
        rows = mosaic_gpu.dequantize(values, scales, q.bits, dtype)
    else:
        rows = jnp.concatenate(reference.dequantize(values, scales, q.bits), axis=1).astype(dtype)
    flat = rows.reshape(-1)
    return (flat if stored_size == size else flat[:size]).reshape(q.shape)
