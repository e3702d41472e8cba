"""Arguments of AdamW in tests and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured
from pallas_kernels.fused_adamw.api import NAME, fused_adamw

TESTED: tuple[tuple[int, ...], ...] = ((1,), (127,), (128,), (1031,), (31, 67), (2048,))
"""Shapes of the leaves of a state: one element, too few, a prime number, full tiles."""


def _call(implementation: str) -> Callable[..., Any]:
    def update(g: Any, p: Any, mu: Any, nu: Any) -> Any:
        return fused_adamw(
            g,
            p,
            mu,
            nu,
            count=10,
            learning_rate=1e-4,
            weight_decay=0.1,
            copy_dtype=jnp.bfloat16,
            implementation=implementation,
        )

    return update


def _measured(shape: str, leaves: int, size: int) -> Measured:
    low = [jax.ShapeDtypeStruct((size,), jnp.bfloat16)] * leaves
    full = [jax.ShapeDtypeStruct((size,), jnp.float32)] * leaves
    # Reads a bf16 gradient, writes a bf16 copy, reads and writes three float32 arrays.
    arguments: Any = (low, full, full, full)
    return Measured(
        NAME, shape, _call, arguments, bytes=leaves * size * (2 + 2 + 24), in_place=(1, 2, 3)
    )


MEASURED = (
    _measured("one leaf of 2^28", 1, 2**28),
    _measured("500 leaves of 2^16", 500, 2**16),
)
