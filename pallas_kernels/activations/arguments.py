"""Arguments of the activations in tests and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activations.api import GELU, SWIGLU, bias_gelu, swiglu
from pallas_kernels.arguments import Measured, and_backward

TESTED: tuple[tuple[int, ...], ...] = (
    (1, 1),
    (3, 127),
    (128,),
    (1, 131),
    (2, 5, 1031),
    (9, 256),
    (23, 128),
)
"""Too narrow, one row, prime sizes, full tiles, rows that blocks share unequally."""


def _bias_gelu(implementation: str) -> Callable[..., Any]:
    def call(x: Any, bias: Any) -> Any:
        return bias_gelu(x, bias, implementation=implementation)

    return call


def _swiglu(implementation: str) -> Callable[..., Any]:
    def call(gate: Any, up: Any) -> Any:
        return swiglu(gate, up, implementation=implementation)

    return call


_X = jax.ShapeDtypeStruct((4096, 6400), jnp.bfloat16)
_BIAS = jax.ShapeDtypeStruct((6400,), jnp.bfloat16)
_GATE = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
_X_BYTES, _GATE_BYTES = _X.size * 2, _GATE.size * 2

# Forward reads x and writes y. Backward reads x and dy and writes dx. For SwiGLU, x and dx count
# twice.
MEASURED = (
    Measured(GELU, "4096 x 6400, forward", _bias_gelu, (_X, _BIAS), bytes=2 * _X_BYTES),
    Measured(
        GELU,
        "4096 x 6400, forward and backward",
        and_backward(_bias_gelu),
        (_X, _X, _BIAS),
        bytes=5 * _X_BYTES,
    ),
    Measured(SWIGLU, "4096 x 14336, forward", _swiglu, (_GATE, _GATE), bytes=3 * _GATE_BYTES),
    Measured(
        SWIGLU,
        "4096 x 14336, forward and backward",
        and_backward(_swiglu),
        (_GATE, _GATE, _GATE),
        bytes=8 * _GATE_BYTES,
    ),
)
