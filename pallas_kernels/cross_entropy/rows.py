"""What is done with a chunk's logits, row by row, in plain JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SKIP = -1
"""The label of a row that has none: it is ignored, or its label is no word of the vocabulary."""


class Factors(NamedTuple):
    r"""What the gradient of a row of logits :math:`z` is made of, float32 [t] each.

    .. math:: a e^{z - \ell} - b [j = y] - c

    Attributes:
      probability: :math:`a`.
      label: :math:`b`.
      uniform: :math:`c`. Rows of the label :data:`SKIP` hold nothing else.
    """

    probability: jax.Array
    label: jax.Array
    uniform: jax.Array


class Statistics(NamedTuple):
    """Of each row of logits, float32 [t]; anything in rows of the label :data:`SKIP`.

    Attributes:
      lse: the logarithm of the sum of exponentials.
      picked: the label's logit.
      total: the sum of logits; None if it was not asked for.
    """

    lse: jax.Array
    picked: jax.Array
    total: jax.Array | None


def statistics(logits: jax.Array, labels: jax.Array, vocabulary: int, total: bool) -> Statistics:
    """Of the first ``vocabulary`` of the logits, float32 [t, v or more], with labels int32 [t]."""
    logits = logits[:, :vocabulary]
    place = jnp.maximum(labels, 0)[:, None]
    picked = jnp.take_along_axis(logits, place, axis=1)[:, 0]
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
    """The loss's by the logits, in their shape, 0 beyond the vocabulary. See :class:`Factors`."""
    probability, label, uniform = (x[:, None] for x in factors)
    place = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    mine = jnp.where(place == labels[:, None], label, 0)
    found = probability * jnp.exp(logits - lse[:, None]) - mine - uniform
    found = jnp.where(labels[:, None] == SKIP, uniform, found)
    return jnp.where(place < vocabulary, found, 0).astype(dtype)
