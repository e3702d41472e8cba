"""Activations that read and write memory once: GELU of x + bias with dropout, and SwiGLU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from pallas_kernels import checks, dropout
from pallas_kernels.activations import mosaic_gpu, reference
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.elementwise import SMALLEST
from pallas_kernels.varying import alike

GELU = "bias_gelu"
SWIGLU = "swiglu"


class _How(NamedTuple):
    approximate: bool
    rate: float
    chosen: Implementation


def bias_gelu(
    x: jax.Array,
    bias: jax.Array | None = None,
    *,
    approximate: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Computes GELU of x + bias, then dropout.

    .. math::

        z = x + b, \quad
        y = \tfrac12 z \left(1 + \tanh\left(\sqrt{2 / \pi} (z + 0.044715 z^3)\right)\right)
        \quad\text{or}\quad
        y = \tfrac12 z \left(1 + \operatorname{erf}(z / \sqrt 2)\right), \\
        y' = y m / (1 - r), \quad m \sim \operatorname{Bernoulli}(1 - r)

    Source: Hendrycks and Gimpel, arXiv:1606.08415; DeepSpeed's ``gelu_kernels.cu`` and
    ``dropout_kernels.cu``. The computation is in float32. The forward pass saves x, the bias and
    the key, and the backward pass recomputes the rest. XLA draws the mask in both passes, one byte
    per element.

    With ``"mosaic_gpu"``, XLA still handles widths below 128, and ``jax.shard_map`` needs
    ``check_vma=False``.

    Args:
      x: floats [..., width].
      bias: :math:`b`, floats [width]; None is 0.
      approximate: whether to use the form with tanh instead of the exact one.
      dropout_rate: :math:`r`, at least 0 and below 1.
      dropout_key: a key of :mod:`jax.random`; needed if the rate is not 0.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      An array in the shape and dtype of x.

    Raises:
      ValueError: x is empty, the bias has another shape, the rate is out of range, the key is
        missing, or the implementation does not work on this device.
      TypeError: an array does not have a float dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> bias_gelu(jnp.array([-1.0, 0.0, 1.0]), jnp.ones(3)).round(3)
      Array([0.   , 0.841, 1.955], dtype=float32)
    """
    x = checks.rows(GELU, x)
    bias = None if bias is None else checks.of_width(GELU, "bias", bias, x.shape[-1])
    rate = dropout.checked(GELU, dropout_rate, dropout_key)
    chosen = choose(GELU, implementation)
    how = _How(bool(approximate), rate, "xla" if x.shape[-1] < SMALLEST else chosen)
    x, bias = alike(x, bias)
    return _bias_gelu(x, bias, dropout_key if rate > 0 else None, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _bias_gelu(x: Any, bias: Any, key: Any, how: _How) -> jax.Array:
    kept = dropout.drawn(x, key, how.rate)
    run = (reference if how.chosen == "xla" else mosaic_gpu).bias_gelu
    return run(x, bias, kept, how.approximate, how.rate).astype(x.dtype)


def _forward(x: Any, bias: Any, key: Any, how: _How) -> Any:
    return _bias_gelu(x, bias, key, how), (x, bias, key)


def _backward(how: _How, saved: Any, dy: jax.Array) -> Any:
    x, bias, key = saved
    kept = dropout.drawn(x, key, how.rate)
    total: jax.Array | None
    if how.chosen == "xla":
        dz = reference.bias_gelu_backward(x, bias, kept, dy, how.approximate, how.rate)
        total = reference.over_rows(dz)
    else:
        dz, total = mosaic_gpu.bias_gelu_backward(x, bias, kept, dy, how.approximate, how.rate)
    d_bias = None if total is None or bias is None else total.astype(bias.dtype)
    return dz.astype(x.dtype), d_bias, None


_bias_gelu.defvjp(_forward, _backward)


def swiglu(gate: jax.Array, up: jax.Array, *, implementation: str | None = None) -> jax.Array:
    r"""Computes SwiGLU, the gated activation of Llama's feed-forward layers.

    .. math::

        y = g \, \sigma(g) \, u

    Source: Shazeer, arXiv:2002.05202; Liger's ``swiglu.py``. The computation is in float32. The
    forward pass saves only its two arguments; the backward pass computes both cotangents in one
    pass over memory.

    With ``"mosaic_gpu"``, XLA still handles arrays of fewer than 128 elements, and
    ``jax.shard_map`` needs ``check_vma=False``.

    Args:
      gate, up: :math:`g, u`, floats of the same shape and dtype.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      An array in the shape and dtype of gate and up.

    Raises:
      ValueError: gate and up are empty, their shapes differ, or the implementation does not work on
        this device.
      TypeError: gate and up do not have float dtypes, or their dtypes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> swiglu(jnp.array([0.0, 1.0]), jnp.full(2, 2.0)).round(3)
      Array([0.   , 1.462], dtype=float32)
    """
    gate, up = checks.floats(SWIGLU, "gate", gate), checks.floats(SWIGLU, "up", up)
    if gate.shape != up.shape or gate.size == 0:
        raise ValueError(
            f"{SWIGLU}: gate has shape {gate.shape}, up {up.shape}; they must be one, not empty"
        )
    if gate.dtype != up.dtype:
        raise TypeError(f"{SWIGLU}: gate has dtype {gate.dtype}, up {up.dtype}; cast one of them")
    chosen = choose(SWIGLU, implementation)
    gate, up = alike(gate, up)
    return _swiglu(gate, up, "xla" if gate.size < SMALLEST else chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu(gate: jax.Array, up: jax.Array, chosen: Implementation) -> jax.Array:
    if chosen == "xla":
        return reference.swiglu(gate, up).astype(gate.dtype)
    return mosaic_gpu.swiglu(gate, up)


def _swiglu_backward(chosen: Implementation, saved: Any, dy: jax.Array) -> Any:
    grads = (reference if chosen == "xla" else mosaic_gpu).swiglu_backward(*saved, dy)
    return tuple(x.astype(dy.dtype) for x in grads)


_swiglu.defvjp(lambda gate, up, chosen: (_swiglu(gate, up, chosen), (gate, up)), _swiglu_backward)
