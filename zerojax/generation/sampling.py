"""The choice of the next token from logits.

>>> sampling = Sampling(temperature=0.7, top_k=50, top_p=0.95)
>>> tokens = sampling.choose(jnp.zeros((4, 100)), jax.random.key(0))          # int32 [4]

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from zerojax.generation.checks import require
from zerojax.models.loss import widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of the choice, in the order in which they apply, as in transformers.

    Attributes:
      temperature: T; tokens are drawn from softmax(logits / T). 0 takes the largest logit.
      top_k: Draws only from the k largest logits.
      top_p: Draws only from the smallest set of tokens whose probabilities sum to p or more
        (nucleus sampling, arXiv:1904.09751).

    Raises:
      ValueError: An option is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        t, k, p = self.temperature, self.top_k, self.top_p
        require(t >= 0, "temperature", t, "0 (greedy) or more")
        require(k is None or k >= 1, "top_k", k, "1 or more, or None for all tokens")
        require(p is None or 0 < p <= 1, "top_p", p, "above 0 and at most 1")
        if self.is_greedy and (k, p) != (None, None):
            raise ValueError("top_k and top_p need a temperature above 0")

    @property
    def is_greedy(self) -> bool:
        """True if the largest logit is taken, and no key is needed."""
        return self.temperature == 0

    def choose(self, logits: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns a token for each row of logits [B, V], int32 [B]."""
        if self.is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert key is not None
        return jax.random.categorical(key, self.filtered(logits)).astype(jnp.int32)

    def filtered(self, logits: jax.Array) -> jax.Array:
        """Returns logits [B, V] divided by the temperature, -inf for tokens that are not drawn.

        >>> Sampling(temperature=1.0, top_k=2).filtered(jnp.array([[1.0, 3.0, 2.0]])).tolist()
        [[-inf, 3.0, 2.0]]
        """
        logits = widen(logits) / self.temperature
        vocabulary = logits.shape[-1]
        if self.top_k is not None and self.top_k < vocabulary:
            smallest = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            descending = -jnp.sort(-logits, axis=-1)
            probabilities = jax.nn.softmax(descending)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            smallest = jnp.min(
                jnp.where(before < self.top_p, descending, jnp.inf), axis=-1, keepdims=True
            )
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return logits
