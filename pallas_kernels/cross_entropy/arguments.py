"""Arguments of cross-entropy in tests and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured
from pallas_kernels.cross_entropy.api import NAME, softmax_cross_entropy

TESTED: tuple[tuple[int, int, int], ...] = ((5, 16, 301), (4, 16, 2176), (1, 8, 4107), (7, 8, 5))
"""Tokens, width, vocabulary: odd; full tiles and a rest; one token; too few for a kernel."""


def both_ways(implementation: str) -> Callable[..., Any]:
    """Returns a function for losses, and gradients of hidden and weight from their cotangents."""

    def call(hidden: Any, weight: Any, labels: Any, cotangents: Any) -> tuple[Any, ...]:
        def losses(hidden: Any, weight: Any) -> Any:
            return softmax_cross_entropy(hidden, weight, labels, implementation=implementation)

        values, vjp = jax.vjp(losses, hidden, weight)
        return (values, *vjp(cotangents))

    return call


def _measured(tokens: int, width: int, vocabulary: int) -> Measured:
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    cotangents = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    return Measured(
        NAME,
        f"{tokens} x {width} x {vocabulary} bf16, forward and backward",
        both_ways,
        (hidden, weight, labels, cotangents),
        # Hidden, weight and their gradients, labels, cotangents and losses.
        bytes=2 * 2 * width * (tokens + vocabulary) + 3 * 4 * tokens,
        # Three products. Recomputing the logits is a fourth (8 instead of 6).
        flops=6 * tokens * width * vocabulary,
    )


MEASURED: tuple[Measured, ...] = (
    _measured(32768, 4096, 128256),
    _measured(8192, 1600, 50257),
)
