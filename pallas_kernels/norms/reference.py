"""Definition of layer norm and RMS norm in plain JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Implementation


class How(NamedTuple):
    """Static arguments, see :func:`pallas_kernels.layer_norm`.

    Attributes:
      name: the name of the function.
      centered: True if the mean is subtracted, as in layer norm.
      eps: the number added to the variance.
      bias: the dtype of the bias, or None without a bias.
      chosen: the implementation.
    """

    name: str
    centered: bool
    eps: float
    bias: Any
    chosen: Implementation


class Forward(NamedTuple):
    """Results of the forward pass.

    Attributes:
      y: the result, like x.
      h: the array that was normalized, like x.
      mean: the mean of h, float32 [...]; None if it is not subtracted.
      scale: :math:`1 / \\sigma`, float32 [...].
    """

    y: Any
    h: Any
    mean: Any
    scale: Any


class Backward(NamedTuple):
    """Cotangents.

    Attributes:
      x: an array like x; also that of a residual.
      scale: float32 [width].
      bias: float32 [width]; None without a bias.
    """

    x: Any
    scale: Any
    bias: Any


def normalized(h: Any, mean: Any, scale: Any) -> Any:
    """Normalizes h, float32, to mean 0, unless ``mean`` is None, and variance 1."""
    return (h if mean is None else h - mean) * scale


def forward(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    how: How,
) -> Forward:
    """Normalizes rows of x [..., width], or of the sum with ``residual``."""
    h = x
    if residual is not None:
        h = (residual.astype(jnp.float32) + x.astype(jnp.float32)).astype(x.dtype)
    z = h.astype(jnp.float32)
    mean = jnp.mean(z, axis=-1, keepdims=True) if how.centered else None
    deviation = z if mean is None else z - mean
    scale = lax.rsqrt(jnp.mean(deviation * deviation, axis=-1, keepdims=True) + how.eps)
    y = normalized(z, mean, scale) * weight.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return Forward(y.astype(x.dtype), h, None if mean is None else mean[..., 0], scale[..., 0])


def backward(
    h: jax.Array,
    weight: jax.Array,
    mean: jax.Array | None,
    scale: jax.Array,
    dy: jax.Array,
    dh: jax.Array | None,
    how: How,
) -> Backward:
    r"""Computes all cotangents from those of y and, if h is a result, of h.

    .. math::

        \hat h = (h - \mu) / \sigma, \quad g = w \, dy, \\
        dx = (g - \operatorname{mean}(g) - \hat h \operatorname{mean}(g \hat h)) / \sigma + dh, \\
        dw = \sum dy \, \hat h, \quad db = \sum dy

    The term ``mean(g)`` applies to layer norm only.
    """
    scale = scale[..., None]
    hat = normalized(h.astype(jnp.float32), None if mean is None else mean[..., None], scale)
    d = dy.astype(jnp.float32)
    g = d * weight.astype(jnp.float32)
    correction = hat * jnp.mean(g * hat, axis=-1, keepdims=True)
    if how.centered:
        correction += jnp.mean(g, axis=-1, keepdims=True)
    total = (g - correction) * scale
    if dh is not None:
        total += dh.astype(jnp.float32)
    rows = tuple(range(h.ndim - 1))
    return Backward(
        total.astype(h.dtype),
        jnp.sum(d * hat, axis=rows),
        None if how.bias is None else jnp.sum(d, axis=rows),
    )
