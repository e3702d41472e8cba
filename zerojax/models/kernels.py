"""Fused GPT layers from `pallas_kernels`, and a loss that does not store all logits at once.

Example::

    zero = zerojax.zero("configs/zero3_bf16.json")
    model = GPT(GPTConfig(**SIZES["small"]), kernels=Kernels(zero.per_device))
    losses = model.apply({"params": params}, tokens, targets=targets)    # [B, T], no logits

Shapes: B batch, T time, D n_embd, H n_head, V vocab_size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

import pallas_kernels
from zerojax.models.blocks import causal_attention
from zerojax.xla.types import PyTree


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The fused layers.

    Attributes:
      per_device: `zero.per_device`, which runs a kernel on each device's rows.
      implementation: "mosaic_gpu", "xla", or None for whichever was measured to be faster on the
        device.
    """

    per_device: Callable[..., Callable[..., PyTree]]
    implementation: str | None = None

    def layer_norm(
        self, norm: nn.LayerNorm, x: jax.Array, residual: jax.Array | None = None
    ) -> PyTree:
        """Computes norm(x) of x [B, T, D]; with a residual norm(x + residual), and the sum."""
        eps, weights = norm.epsilon, norm.variables["params"]

        def layer_norm(
            x: jax.Array, residual: jax.Array | None, scale: jax.Array, bias: jax.Array
        ) -> jax.Array | tuple[jax.Array, jax.Array]:
            return pallas_kernels.layer_norm(
                x, scale, bias, residual=residual, eps=eps, implementation=self.implementation
            )

        fused = self.per_device(layer_norm, replicated=[2, 3])
        return fused(x, residual, weights["scale"], weights["bias"])

    def causal_attention(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        """Computes causal attention [B, T, H, d] by cuDNN, or unfused if cuDNN refuses."""

        def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> jax.Array:
            return fused_causal_attention(q, k, v, mask, implementation="cudnn")

        try:
            return self.per_device(cudnn)(q, k, v, mask)
        except ValueError:  # no cuDNN, or it does not support these arguments
            return causal_attention(q, k, v, mask)

    def losses(self, hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
        """Computes the cross-entropy [B, T] of hidden [B, T, D] projected on the table [V, D]."""

        def losses(hidden: jax.Array, targets: jax.Array, table: jax.Array) -> jax.Array:
            return pallas_kernels.softmax_cross_entropy(
                hidden, table.astype(hidden.dtype), targets, implementation=self.implementation
            )

        return self.per_device(losses, replicated=[2])(hidden, targets, table)


def fused_causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    window: int | None = None,
    implementation: str | None,
) -> jax.Array:
    """Computes `zerojax.models.blocks.causal_attention` with `pallas_kernels.attention`.

    The implementations differ where a query sees no key: some have no finite gradient. Such a
    query sees all earlier keys, and its result is replaced by 0. With a mask the implementation
    reads bool [B, 1, T, T].
    """
    visible = None
    if mask is not None:
        positions = jnp.arange(mask.shape[1])
        last_key = jax.lax.cummax(jnp.where(mask, positions, -mask.shape[1]), axis=1)
        sees_a_key = positions - last_key < (window or mask.shape[1])  # [B, T]
        visible = mask[:, None, None, :] | ~sees_a_key[:, None, :, None]
    y = pallas_kernels.attention(
        q, k, v, mask=visible, is_causal=True, sliding_window=window, implementation=implementation
    )
    return y if mask is None else jnp.where(sees_a_key[..., None, None], y, 0)


def normalize(norm: nn.LayerNorm, x: jax.Array, kernels: Kernels | None) -> jax.Array:
    """Computes norm(x)."""
    normalized: jax.Array = kernels.layer_norm(norm, x) if kernels else norm(x)
    return normalized


def add_and_normalize(
    norm: nn.LayerNorm, x: jax.Array, branch: jax.Array, kernels: Kernels | None
) -> tuple[jax.Array, jax.Array]:
    """Computes norm(x + branch), and the sum."""
    if kernels:
        normalized, total = kernels.layer_norm(norm, branch, x)
        return normalized, total
    return norm(x + branch), x + branch
