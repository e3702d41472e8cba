"""Normalization with gradients: residuals of the backward pass, choice of the implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.dropout import drawn
from pallas_kernels.norms import mosaic_gpu, mosaic_gpu_backward, reference
from pallas_kernels.norms.reference import How


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def norm(x: Any, weight: Any, bias: Any, residual: Any, key: Any, how: How) -> Any:
    """Computes :func:`pallas_kernels.layer_norm` or RMS norm; ``key`` is None without dropout."""
    return _forward(x, weight, bias, residual, key, how)[0]


def _forward(x: Any, weight: Any, bias: Any, residual: Any, key: Any, how: How) -> Any:
    kept = drawn(x, key, how.rate)
    run = reference.forward if how.chosen == "xla" else mosaic_gpu.forward
    outputs = run(x, weight, bias, residual, kept, how)
    result = outputs.y if residual is None else (outputs.y, outputs.h)
    return result, (outputs.h, weight, outputs.mean, outputs.scale, key)


def _backward(how: How, saved: Any, cotangents: Any) -> Any:
    h, weight, mean, scale, key = saved
    dy, dh = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents, None)
    kept = drawn(h, key, how.rate)
    run = reference.backward if how.chosen == "xla" else mosaic_gpu_backward.backward
    grads = run(h, weight, mean, scale, kept, dy, dh, how)
    d_bias = None if how.bias is None else grads.bias.astype(how.bias)
    return grads.x, grads.scale.astype(weight.dtype), d_bias, grads.residual, None


norm.defvjp(_forward, _backward)
