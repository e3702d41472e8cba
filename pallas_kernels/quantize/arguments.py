"""Arguments of quantisation in tests and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured
from pallas_kernels.quantize.api import (
    DEQUANTIZE,
    QUANTIZE,
    Quantized,
    dequantize_blockwise,
    quantize_blockwise,
)

TESTED: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 128),
    ((3, 128), 128),
    ((7, 128), 128),
    ((5, 1031), 256),
    ((70, 128), 128),
    ((4, 512), 512),
)
"""Shapes and block sizes: too few blocks, a ragged tile, a padded block, several programs, several
vectors per thread."""

SIZE, BLOCK = 2**26, 256


def _quantize(bits: int) -> Callable[[str], Callable[..., Any]]:
    def call(implementation: str) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            return quantize_blockwise(x, bits=bits, block_size=BLOCK, implementation=implementation)

        return run

    return call


def _dequantize(bits: int) -> Callable[[str], Callable[..., Any]]:
    def call(implementation: str) -> Callable[..., Any]:
        def run(values: Any, scales: Any) -> Any:
            q = Quantized(values, scales, (SIZE,), jnp.bfloat16, bits)
            return dequantize_blockwise(q, implementation=implementation)

        return run

    return call


def _measured(bits: int) -> tuple[Measured, Measured]:
    x = jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((SIZE // BLOCK, BLOCK * bits // 8), jnp.int8)
    scales = jax.ShapeDtypeStruct((SIZE // BLOCK,), jnp.float32)
    bytes_moved = x.size * 2 + values.size + scales.size * 4
    shape = f"2^26 bf16, {bits} bits"
    return (
        Measured(QUANTIZE, shape, _quantize(bits), (x,), bytes=bytes_moved),
        Measured(DEQUANTIZE, shape, _dequantize(bits), (values, scales), bytes=bytes_moved),
    )


MEASURED = (*_measured(8), *_measured(4))
