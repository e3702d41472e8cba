"""Statistics and gradient of a chunk's logits, row by row, in plain JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SKIP = -1
"""Label of a row that is ignored, or whose label is not in the vocabulary."""


class Factors(NamedTuple):
    r"""Coefficients of the gradient of each row of logits :math:`z`, float32 [t] each.

    .. math:: a e^{z - \ell} - b [j = y] - c

    Attributes:
      probability: :math:`a`.
      label: :math:`b`.
      uniform: :math:`c`; in rows with the label :data:`SKIP`, the value of all elements.
    """

    probability: jax.Array
    label: jax.Array
    uniform: jax.Array


class Statistics(NamedTuple):
    """Statistics of each row of logits, float32 [t]; undefined in rows with the label :data:`SKIP`.

    Attributes:
      lse: the logarithm of the sum of exponentials.
      picked: the label's logit.
      total: the sum of logits; None if it was not requested.
    """

    lse: jax.Array
    picked: jax.Array
    total: jax.Array | None


def statistics(logits: jax.Array, labels: jax.Array, vocabulary: int, total: bool) -> Statistics:
    """Computes statistics of the first ``vocabulary`` logits [t, v or more], labels int32 [t]."""
    logits = logits[:, :vocabulary]
    index = jnp.maximum(labels, 0)[:, None]
    picked = jnp.take_along_axis(logits, index, axis=1)[:, 0]
    lse = jax.nn.logsumexp(logits, axis=1)
    return Statistics(lse, picked, jnp.sum(logits, axis=1) if total else None)


def gradient(
    logits: jax.Array,
    labels: jax.Array,
    vocabulary: int,
    lse: jax.Array,
    factors: Factors,
    dtype: Any,
) -> jax.Array:
    """Computes the gradient by the logits, 0 beyond the vocabulary, see :class:`Factors`."""
    probability, label, uniform = (x[:, None] for x in factors)
    classes = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    label_term = jnp.where(classes == labels[:, None], label, 0)
    d_logits = probability * jnp.exp(logits - lse[:, None]) - label_term - uniform
    d_logits = jnp.where(labels[:, None] == SKIP, uniform, d_logits)
    return jnp.where(classes < vocabulary, d_logits, 0).astype(dtype)
