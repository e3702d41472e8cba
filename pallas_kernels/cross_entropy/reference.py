"""Definition of softmax cross-entropy in plain JAX, with all logits at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def softmax_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    *,
    vocabulary_last: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> jax.Array:
    """Computes :func:`pallas_kernels.softmax_cross_entropy`."""
    logits = project(hidden, weight, bias, vocabulary_last)
    vocabulary = logits.shape[-1]
    labels = labels.astype(jnp.int32)
    ignored = labels == ignore_index
    valid = (labels >= 0) & (labels < vocabulary)
    logits = jnp.where(ignored[..., None], 0, logits)
    lse = jax.nn.logsumexp(logits, axis=-1)
    index = jnp.where(valid, labels, 0)
    picked = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * jnp.where(valid, picked, jnp.nan)
    if label_smoothing:
        losses -= label_smoothing / vocabulary * jnp.sum(logits, axis=-1)
    if z_loss:
        losses += z_loss * lse * lse
    return jnp.where(ignored, 0, losses)


def project(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, vocabulary_last: bool
) -> jax.Array:
    """Computes logits, float32 [..., v]."""
    contracting = ((hidden.ndim - 1,), (0 if vocabulary_last else 1,))
    logits = lax.dot_general(
        hidden, weight, (contracting, ((), ())), preferred_element_type=jnp.float32
    )
    return logits if bias is None else logits + bias.astype(jnp.float32)
