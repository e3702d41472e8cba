"""Attention in plain JAX, for dropout, which ``jax.nn.dot_product_attention`` lacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
    rate: float,
    key: jax.Array | None,
) -> jax.Array:
    """Computes :func:`pallas_kernels.attention` with dropout, softmax in float32 or wider.

    Args:
      rate: The fraction of weights that become 0.
      key: A key of ``jax.random``; None for no dropout.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=wide)
    scores = scores.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    scores = scores * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = causal if mask is None else mask & causal
    scores = scores if mask is None else jnp.where(mask, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores)
    if key is not None:
        kept = jax.random.bernoulli(key, 1 - rate, weights.shape)
        weights = jnp.where(kept, weights / (1 - rate), 0)
    weights = weights.astype(q.dtype).reshape(q.shape[0], *grouped.shape[2:4], *scores.shape[-2:])
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)
