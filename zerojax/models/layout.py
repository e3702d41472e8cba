"""Splitting of a model's activations over the mesh axes "seq" and "model".

A model calls its `Layout` where the sharding of an activation changes. Without these axes, every
method returns its argument, or computes what plain flax computes.

>>> layout, x = Layout(), jnp.ones((2, 4, 8))
>>> layout.features(layout.tokens(x)) is x
True

Shapes: B batch, T time, D features, H heads, d features of a head, F features of a wide layer.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import Attention
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.step.sequence import SequenceAxis
from zerojax.trace.tiled import tiled


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the activations.

    Attributes:
      sequence: The axis that shards rows along their tokens: `zero.sequence`.
      tensor: The axis that shards heads, wide layers and the vocabulary, and the tokens between.
    """

    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    def for_generation(self) -> "Layout":
        """Returns the layout of few tokens, which "seq" and "model" do not shard.

        "model" shards heads, wide layers and the vocabulary; partial sums are all-reduced.
        """
        tensor = self.tensor and dataclasses.replace(self.tensor, shards_tokens=False)
        return Layout(None, tensor)

    def check(self, tokens: jax.Array) -> None:
        """Rejects rows [B, T] whose tokens do not divide among the devices of "model"."""
        if self.tensor:
            self.tensor.check_tokens(tokens)

    def positions(self, x: jax.Array) -> jax.Array:
        """Shards an array [T, ...] that all rows share along its tokens."""
        return self.sequence.positions(x) if self.sequence else x

    def embedded(self, table: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
        """Looks up tokens [B, T], and shards the result [B, T, D] along them."""
        if self.tensor is None:
            return table(tokens)
        if tokens.size == 1:  # XLA makes it a slice, for which it would gather the sharded table
            return self.tensor.looked_up(table(jnp.repeat(tokens, 2, axis=1)))[:, :1]
        return self.tensor.looked_up(table(tokens))

    def tokens(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, D] along its tokens over "seq"; with "model", `branch` does that."""
        return self.sequence.tokens(x) if self.sequence and not self.tensor else x

    def branch(self, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps attention or an MLP, [B, T, D] -> [B, T, D]: gathers tokens, scatters them after.

        The result's sums over the devices of "model" are reduced by that scatter.
        """
        return self.tensor.between(fn) if self.tensor else fn

    def gathered(self, x: jax.Array) -> jax.Array:
        """All-gathers the tokens of [B, T, D] over "model", before the LM head."""
        return self.tensor.gathered(x) if self.tensor else x

    def features(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, F] along its features."""
        return self.tensor.features(x) if self.tensor else x

    def heads(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, H, d] along its heads."""
        return self.tensor.heads(x) if self.tensor else x

    def split(self, dense: nn.Dense, x: jax.Array, count: int) -> Sequence[jax.Array]:
        """Computes `jnp.split(dense(x), count, -1)` with sharded features."""
        if self.tensor is None:
            return jnp.split(dense(x), count, axis=-1)
        weights = dense.variables["params"]
        return self.tensor.side_by_side(x, weights["kernel"], weights["bias"], count, dense.dtype)

    def attention(self, fn: Attention) -> Attention:
        """Wraps an attention, which then runs on some heads and all tokens on each device."""
        if self.sequence is None:
            return fn
        return self.sequence.attention(
            fn, sharded=self.tensor.sharded_heads if self.tensor else None
        )

    def in_chunks(
        self, fn: Callable[..., jax.Array], chunks: int | None
    ) -> Callable[..., jax.Array]:
        """Wraps a function of positions to run on chunks of the tokens, see `zerojax.tiled`."""
        shards = self.sequence.size if self.sequence else 1
        return tiled(fn, chunks=chunks, shards=shards) if chunks else fn
