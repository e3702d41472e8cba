"""Arguments of the gradient norm in tests and benchmark."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured
from pallas_kernels.grad_norm_finite.api import NAME, grad_norm_finite

TESTED: tuple[tuple[int, ...], ...] = ((), (1,), (127,), (128,), (8209,), (64, 129), (4096,))


def _call(implementation: str) -> Any:
    return lambda grads: grad_norm_finite(grads, implementation=implementation)


def _measured(shape: str, leaves: int, size: int, dtype: Any) -> Measured:
    x = jax.ShapeDtypeStruct((size,), dtype)
    arguments: Any = ([x] * leaves,)
    return Measured(NAME, shape, _call, arguments, bytes=leaves * size * x.dtype.itemsize)


MEASURED = (
    _measured("one leaf of 2^28, bf16", 1, 2**28, jnp.bfloat16),
    _measured("one leaf of 2^28, fp32", 1, 2**28, jnp.float32),
    _measured("500 leaves of 2^16, bf16", 500, 2**16, jnp.bfloat16),
)
