"""Definitions of GELU of a sum and of SwiGLU in plain JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import dropped

_CUBE = 0.044715
_SLOPE = 2 * math.sqrt(2 / math.pi)
_FAR = 20.0
"""Bound beyond which GELU is 0 or the identity in float32; its square does not overflow."""


def erf(x: Any) -> Any:
    """Computes the error function."""
    return lax.erf(x)


def gelu(z: Any, approximate: bool, erf: Callable[[Any], Any] = erf) -> tuple[Any, Any]:
    r"""Returns GELU and its derivative, float32.

    ``approximate`` uses :math:`\tfrac12 (1 + \tanh u) = \sigma(2 u)`, which loses no digits for
    negative z.
    """
    # Not lax.clamp: a kernel needs its bounds as full arrays, which a scanned model would carry.
    clipped = jnp.maximum(jnp.minimum(z, _FAR), -_FAR)
    square = clipped * clipped
    if approximate:
        share = lax.logistic(_SLOPE * clipped * (1 + _CUBE * square))
        slope = share * (1 - share) * (_SLOPE * (1 + 3 * _CUBE * square))
    else:
        share = 0.5 * (1 + erf(clipped * math.sqrt(0.5)))
        slope = jnp.exp(-0.5 * square) * (1 / math.sqrt(2 * math.pi))
    return z * share, share + clipped * slope


def bias_gelu(
    x: Any,
    bias: Any,
    kept: Any,
    approximate: bool,
    rate: float,
    erf: Callable[[Any], Any] = erf,
) -> Any:
    """Computes the formula of :func:`pallas_kernels.bias_gelu`, for any slice of x.

    Args:
      x: floats of any shape.
      bias: floats like x, or broadcastable to x; None is 0.
      kept: bool like x, True for elements that dropout keeps; None keeps all.
      approximate: whether to use the form with tanh.
      rate: the dropout rate.
      erf: the error function.

    Returns:
      float32 like x.
    """
    return dropped(gelu(_sum(x, bias), approximate, erf)[0], kept, rate)


def bias_gelu_backward(
    x: Any,
    bias: Any,
    kept: Any,
    dy: Any,
    approximate: bool,
    rate: float,
    erf: Callable[[Any], Any] = erf,
) -> Any:
    """Computes the cotangent of ``x + bias``, float32 like x."""
    dy = dropped(dy.astype(jnp.float32), kept, rate)
    return dy * gelu(_sum(x, bias), approximate, erf)[1]


def _sum(x: Any, bias: Any) -> Any:
    x = x.astype(jnp.float32)
    return x if bias is None else x + bias.astype(jnp.float32)


def swiglu(gate: Any, up: Any) -> Any:
    """Computes the formula of :func:`pallas_kernels.swiglu`, float32."""
    g = gate.astype(jnp.float32)
    return g * lax.logistic(g) * up.astype(jnp.float32)


def swiglu_backward(gate: Any, up: Any, dy: Any) -> tuple[Any, Any]:
    """Computes the cotangents of gate and up, float32."""
    g, u, dy = (x.astype(jnp.float32) for x in (gate, up, dy))
    sigmoid = lax.logistic(g)
    return dy * u * (sigmoid * (1 + g * (1 - sigmoid))), dy * (g * sigmoid)


def over_rows(dz: jax.Array) -> jax.Array:
    """Sums to the cotangent of the bias, float32 [width]."""
    return jnp.sum(dz, axis=tuple(range(dz.ndim - 1)), dtype=jnp.float32)
