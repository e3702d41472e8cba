"""Search for tokens that would repeat an n-gram.

>>> written = jnp.array([[5, 6, 7, 5, 6, 0]])                 # five tokens, and a place for more
>>> jnp.flatnonzero(completes(written, 5, written, 5, size=3, vocabulary=9)).tolist()
[7]
"""

import jax
import jax.numpy as jnp


def completes(
    written: jax.Array,
    length: jax.Array | int,
    history: jax.Array,
    count: jax.Array | int,
    *,
    size: int,
    vocabulary: int,
) -> jax.Array:
    """Returns which next tokens complete an n-gram of the history, bool [R, V].

    Args:
      written: Tokens int [R, L], of which the first `length` are written.
      length: The number of written tokens, the same for all rows.
      history: Tokens int [R, S], of which the first `count` are compared.
      count: The number of compared tokens, the same for all rows.
      size: n. With 1, each token of the history is found.
      vocabulary: V.
    """
    rows, windows = history.shape[0], history.shape[1] - size + 1
    if windows < 1:
        return jnp.zeros((rows, vocabulary), bool)
    prefix = jax.lax.dynamic_slice_in_dim(written, length - (size - 1), size - 1, 1)
    ends = jnp.arange(windows) + size - 1
    is_match = jnp.broadcast_to((ends < count) & (length >= size - 1), (rows, windows))
    for i in range(size - 1):
        is_match &= history[:, i : i + windows] == prefix[:, i : i + 1]
    found = jnp.zeros((rows, vocabulary), bool)
    return found.at[jnp.arange(rows)[:, None], history[:, size - 1 :]].max(is_match)
