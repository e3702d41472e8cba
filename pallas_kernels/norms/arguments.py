"""Arguments of the norms in tests and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured, and_backward
from pallas_kernels.norms.api import LAYER, RMS, layer_norm, rms_norm

TESTED: tuple[tuple[int, ...], ...] = (
    (1, 1),
    (3, 127),
    (128,),
    (2, 3, 131),
    (5, 257),
    (8, 256),
    (3, 1000),
    (2, 1600),
)
"""Too narrow, one row, rows that blocks process one, two and four at a time, ragged widths."""


def _layer(implementation: str) -> Callable[..., Any]:
    def call(x: Any, scale: Any, bias: Any) -> Any:
        return layer_norm(x, scale, bias, implementation=implementation)

    return call


def _rms(implementation: str) -> Callable[..., Any]:
    def call(x: Any, scale: Any) -> Any:
        return rms_norm(x, scale, implementation=implementation)

    return call


def _measured(width: int) -> list[Measured]:
    x = jax.ShapeDtypeStruct((4096, width), jnp.bfloat16)
    param = jax.ShapeDtypeStruct((width,), jnp.float32)
    entries = []
    for name, call, params in ((LAYER, _layer, [param] * 2), (RMS, _rms, [param])):
        shape, array_bytes = f"4096 x {width}", x.size * 2
        # Forward reads x and writes y. Backward reads x and dy and writes dx. The rest is small.
        entries += [
            Measured(name, f"{shape}, forward", call, (x, *params), bytes=2 * array_bytes),
            Measured(
                name,
                f"{shape}, forward and backward",
                and_backward(call),
                (x, x, *params),
                bytes=5 * array_bytes,
            ),
        ]
    return entries


MEASURED = (*_measured(1600), *_measured(4096), *_measured(16384))
