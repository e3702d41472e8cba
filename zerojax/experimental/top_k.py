"""Top-k: updates from the largest elements of the gradient; error feedback keeps the others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.xla.types import PyTree


class TopKState(NamedTuple):
    """State of :func:`top_k`.

    Attributes:
      error: The elements not yet passed on, in the form of the parameters.
    """

    error: PyTree


def top_k(fraction: float) -> optax.GradientTransformation:
    r"""Passes on the elements of largest magnitude, with error feedback.

    With the error :math:`e` of the elements left out so far, for each array

    .. math:: h = g + e, \quad u = \operatorname{top}_k(h), \quad e \leftarrow h - u

    Source: Stich et al., Sparsified SGD with Memory, arXiv:1809.07599. The rule sees the reduced
    gradient of the global batch: fewer elements are updated, but no fewer are sent. Elements as
    large as the k-th pass too. Chain it before another rule: ``optax.chain(top_k(0.01),
    optax.sgd(0.1))``.

    Args:
      fraction: The fraction of each array's elements, above 0 and at most 1; one element at least.

    Raises:
      ValueError: The fraction is out of range.

    Example:
      >>> tx = top_k(0.5)
      >>> state = tx.init(jnp.zeros(4))
      >>> for _ in range(2):
      ...     u, state = tx.update(jnp.array([1.0, -3.0, 2.0, 1.5]), state)
      ...     print(u.tolist())
      [0.0, -3.0, 2.0, 0.0]
      [0.0, -3.0, 0.0, 3.0]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"top_k: a fraction above 0 and at most 1, not {fraction}")

    def largest(h: jax.Array) -> jax.Array:
        size = jnp.abs(h)
        k = max(1, round(fraction * h.size))
        least = lax.top_k(size.ravel(), k)[0][-1]
        return jnp.where(size >= least, h, jnp.zeros_like(h))

    def init(params: optax.Params) -> TopKState:
        return TopKState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: TopKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, TopKState]:
        del params
        total = jax.tree.map(jnp.add, updates, state.error)
        chosen = jax.tree.map(largest, total)
        return chosen, TopKState(jax.tree.map(jnp.subtract, total, chosen))

    return optax.GradientTransformation(init, update)
