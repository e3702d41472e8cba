"""Keys to which a query may attend by position: causal, sliding window, packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Seen(NamedTuple):
    """The keys to which each query may attend.

    Attributes:
      is_causal: True if query i attends only to keys 0 to i.
      window: The number of most recent keys, including key i, that remain; None for all.
      segment_ids: Ints [batch, length]; a sequence is a run of equal ids, and its queries attend to
        its keys.
      queries, keys: Numbers of queries and keys.
    """

    is_causal: bool
    window: int | None
    segment_ids: jax.Array | None
    queries: int
    keys: int

    def range_of_keys(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns each query's first key, and the end of its keys, without regard to causality.

        Each is int32 [1 or batch, 1, queries], or None for no limit besides ``is_causal``.
        """
        positions = jnp.arange(self.queries, dtype=jnp.int32)[None]
        first = end = None
        if self.segment_ids is not None:
            first, end = _runs(self.segment_ids)
        if self.window is not None:
            oldest = jnp.maximum(positions - (self.window - 1), 0)
            first = oldest if first is None else jnp.maximum(first, oldest)
        if self.is_causal:
            end = None
        return _of_heads(first), _of_heads(end)

    def mask(self, mask: jax.Array | None) -> jax.Array | None:
        """Excludes from ``mask`` the keys of other sequences and before the window.

        The result is bool [1 or batch, 1 or heads, queries, keys], or None for no limit.
        """
        first, end = self.range_of_keys()
        positions = jnp.arange(self.keys, dtype=jnp.int32)
        for visible in (
            None if first is None else positions >= first[..., None],
            None if end is None else positions < end[..., None],
        ):
            if visible is not None:
                mask = visible if mask is None else mask & visible
        return mask


def _of_heads(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x[:, None]


def _runs(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the start and the end of each position's run of equal ids, int32 [batch, length].

    >>> [x.tolist() for x in _runs(jnp.array([[7, 7, 2, 7]]))]
    [[[0, 0, 2, 3]], [[2, 2, 3, 4]]]
    """
    length = ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    is_start = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = jax.lax.cummax(jnp.where(is_start, positions, 0), axis=1)
    is_end = jnp.pad(is_start[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(is_end, positions + 1, length), axis=1, reverse=True)
    return first, end
