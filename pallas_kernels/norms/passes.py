"""Normalization with gradients: residuals of the backward pass, choice of the implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.norms import mosaic_gpu, mosaic_gpu_backward, reference
from pallas_kernels.norms.reference import How


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def norm(x: Any, weight: Any, bias: Any, residual: Any, how: How) -> Any:
    """Computes :func:`pallas_kernels.layer_norm` or RMS norm."""
    return _forward(x, weight, bias, residual, how)[0]


def _forward(x: Any, weight: Any, bias: Any, residual: Any, how: How) -> Any:
    run = reference.forward if how.chosen == "xla" else mosaic_gpu.forward
    outputs = run(x, weight, bias, residual, how)
    result = outputs.y if residual is None else (outputs.y, outputs.h)
    return result, (outputs.h, weight, outputs.mean, outputs.scale)


def _backward(how: How, saved: Any, cotangents: Any) -> Any:
    h, weight, mean, scale = saved
    dy, dh = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents, None)
    run = reference.backward if how.chosen == "xla" else mosaic_gpu_backward.backward
    grads = run(h, weight, mean, scale, dy, dh, how)
    d_bias = None if how.bias is None else grads.bias.astype(how.bias)
    return grads.x, grads.scale.astype(weight.dtype), d_bias, grads.x if dh is not None else None


norm.defvjp(_forward, _backward)
