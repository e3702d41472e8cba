"""Fused GPT layers from `pallas_kernels`, and a loss that does not store all logits at once.

Example::

    zero = zerojax.zero("configs/zero3_bf16.json")
    model = GPT(GPTConfig(**SIZES["small"]), kernels=Kernels(zero.per_device))
    losses = model.apply({"params": params}, tokens, targets=targets)    # [B, T], no logits

Shapes: B batch, T time, D n_embd, H n_head, V vocab_size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import pallas_kernels


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The fused layers.

    Attributes:
      per_device: `zero.per_device`, which runs a kernel on each device's rows.
      implementation: "mosaic_gpu", "xla", or None for whichever was measured to be faster on the
        device.
    """

    per_device: Callable[..., Any]
    implementation: str | None = None

    def layer_norm(
        self,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        eps: float,
        residual: jax.Array | None = None,
    ) -> Any:
        """Normalizes x [B, T, D]; with a residual, normalizes the sum, and returns the sum too."""

        def layer_norm(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
            return pallas_kernels.layer_norm(
                x, scale, bias, residual=residual, eps=eps, implementation=self.implementation
            )

        return self.per_device(layer_norm, replicated=[2, 3])(x, residual, scale, bias)

    def dense_gelu(self, x: jax.Array, kernel: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
        """Computes gelu(x kernel + bias), [B, T, 4D]; the activation's kernel adds the bias."""

        def bias_gelu(x: Any, bias: Any) -> Any:
            return pallas_kernels.bias_gelu(x, bias, implementation=self.implementation)

        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=dtype)
        return self.per_device(bias_gelu, replicated=[1])(jnp.dot(x, kernel), bias)

    def attention(
        self, q: jax.Array, k: jax.Array, v: jax.Array, otherwise: Callable[..., jax.Array]
    ) -> jax.Array:
        """Computes causal attention [B, T, H, d] without dropout by cuDNN, or by `otherwise`."""

        def cudnn(q: Any, k: Any, v: Any) -> Any:
            return pallas_kernels.attention(q, k, v, is_causal=True, implementation="cudnn")

        try:
            return self.per_device(cudnn)(q, k, v)
        except ValueError:  # no cuDNN, or it does not support these arguments
            return otherwise(q, k, v)

    def losses(self, hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        """Computes the cross-entropy [B, T] of hidden [B, T, D] projected on the table [V, D]."""

        def losses(hidden: Any, targets: Any, table: Any) -> Any:
            return pallas_kernels.softmax_cross_entropy(
                hidden, table.astype(hidden.dtype), targets, implementation=self.implementation
            )

        return self.per_device(losses, replicated=[2])(hidden, targets, table)


class FusedLayerNorm(nn.Module):
    """Fused `nn.LayerNorm`; with a residual, of the sum, which it returns too."""

    kernels: Kernels
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> Any:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        return self.kernels.layer_norm(x, scale, bias, self.eps, residual)


class FusedDenseGelu(nn.Module):
    """Fused `nn.gelu(nn.Dense(features)(x))`."""

    kernels: Kernels
    features: int
    kernel_init: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return self.kernels.dense_gelu(x, kernel, bias, self.dtype)
