"""Layer norm and RMS norm, fused with the preceding sum, in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import jax

from pallas_kernels import checks
from pallas_kernels.dispatch import choose
from pallas_kernels.norms import mosaic_gpu, passes
from pallas_kernels.norms.reference import How
from pallas_kernels.varying import alike

LAYER = "layer_norm"
RMS = "rms_norm"


def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    *,
    residual: jax.typing.ArrayLike | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Any:
    r"""Computes layer norm over the last dimension; with a residual, also the normalized sum.

    .. math::

        h = r + x, \quad
        \mu = \operatorname{mean}(h), \quad \sigma^2 = \operatorname{mean}((h - \mu)^2), \\
        y = w \frac{h - \mu}{\sqrt{\sigma^2 + \epsilon}} + b

    and :math:`h = x` without a residual. Source: Ba, Kiros and Hinton, arXiv:1607.06450; Liger's
    ``layer_norm.py`` and DeepSpeed's ``normalize_kernels.cu``. The computation is in float32, but y
    is computed from h as returned, rounded to the dtype of x.

    The forward pass saves h, two float32 numbers per row, and the scale. The backward pass reads h
    and the cotangents once, and writes float32 partial sums of the scale's and the bias's
    cotangents for a few hundred blocks.

    With ``"mosaic_gpu"``, XLA still handles widths below 128 or above 16384, and ``jax.shard_map``
    needs ``check_vma=False``.

    Args:
      x: floats [..., width].
      scale: :math:`w`, floats [width].
      bias: :math:`b`, floats [width]; None is 0.
      residual: :math:`r`, like x.
      eps: :math:`\epsilon`, not negative; 1e-6 as in flax (torch has 1e-5).
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      y, or (y, h) if there is a residual; in the shape and dtype of x.

    Raises:
      ValueError: x is empty, shapes do not match, a number is out of range,
        or the implementation does not work on this device.
      TypeError: an array does not have a float dtype, or residual has another dtype than x.

    Example:
      >>> import jax.numpy as jnp
      >>> layer_norm(jnp.array([1.0, 2.0, 3.0]), jnp.ones(3), jnp.full(3, 0.5)).round(3)
      Array([-0.725,  0.5  ,  1.725], dtype=float32)
    """
    return _norm(LAYER, x, scale, bias, residual, eps, implementation)


def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    *,
    residual: jax.typing.ArrayLike | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Any:
    r"""Computes RMS norm over the last dimension; with a residual, also the normalized sum.

    .. math::

        h = r + x, \quad
        y = w \frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}}

    Source: Zhang and Sennrich, arXiv:1910.07467; Liger's ``rms_norm.py`` and
    ``fused_add_rms_norm.py``. The rest is as in :func:`layer_norm`, but the forward pass saves one
    number per row.

    Args:
      x: floats [..., width].
      scale: :math:`w`, floats [width].
      residual: :math:`r`, like x.
      eps: :math:`\epsilon`, not negative; 1e-6 as in flax.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      y, or (y, h) if there is a residual; in the shape and dtype of x.

    Raises:
      ValueError, TypeError: as for :func:`layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> y, h = rms_norm(jnp.array([1.0, 5.0]), jnp.ones(2), residual=jnp.array([0.0, 2.0]))
      >>> y.round(1), h
      (Array([0.2, 1.4], dtype=float32), Array([1., 7.], dtype=float32))
    """
    return _norm(RMS, x, scale, None, residual, eps, implementation)


def _norm(
    name: str,
    x: Any,
    scale: Any,
    bias: Any,
    residual: Any,
    eps: float,
    implementation: str | None,
) -> Any:
    x = checks.rows(name, x)
    width = x.shape[-1]
    scale = checks.of_width(name, "scale", scale, width)
    bias = None if bias is None else checks.of_width(name, "bias", bias, width)
    if residual is not None:
        residual = checks.floats(name, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{name}: residual has shape {residual.shape}, x has {x.shape}")
        if residual.dtype != x.dtype:
            raise TypeError(
                f"{name}: residual has dtype {residual.dtype}, x has {x.dtype}; cast one of them"
            )
    if not 0 <= float(eps) < math.inf:
        raise ValueError(f"{name}: eps is {eps}; it must be finite and not negative")
    chosen = choose(name, implementation)
    if not mosaic_gpu.SMALLEST <= width <= mosaic_gpu.LARGEST:
        chosen = "xla"
    dtype = None if bias is None else bias.dtype
    how = How(name, name == LAYER, float(eps), dtype, chosen)
    arrays = alike(x, scale, bias, residual)
    return passes.norm(*arrays, how)
