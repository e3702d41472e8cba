"""Splitting of a model's activations over the mesh axes "seq" and "model".

A model calls its `Layout` where the sharding of an activation changes. Without these axes, every
method returns its argument, or computes what plain flax computes.

>>> layout, x = Layout(), jnp.ones((2, 4, 8))
>>> layout.features(layout.tokens(x)) is x
True

Shapes: B batch, T time, D features, H heads, d features of a head, F features of a wide layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.devices.mesh import SEQUENCE, nearest_multiples, sequence_size
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
      shards_tokens: Whether `tensor` also shards tokens between blocks. Otherwise partial sums are
        all-reduced, twice a block.
    """

    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None
    shards_tokens: bool = True

    def for_generation(self) -> "Layout":
        """Returns the layout of few tokens, which "seq" and "model" do not shard.

        "model" shards heads, wide layers and the vocabulary; partial sums are all-reduced.
        """
        return Layout(None, self.tensor, shards_tokens=False)

    def check(self, tokens: jax.Array) -> None:
        """Rejects rows [B, T] whose tokens do not divide among the devices of "model"."""
        if self.tensor is None or not self.shards_tokens:
            return
        size, n = tokens.shape[1], self.tensor.devices * sequence_size(self.tensor.mesh)
        if size % n:
            raise ValueError(
                f"{size} tokens in a row do not divide among the {n} devices of the mesh axis "
                f"{self.tensor.axis!r}: pad or cut the rows to {nearest_multiples(size, n)}"
            )

    def positions(self, x: jax.Array) -> jax.Array:
        """Shards an array [T, ...] that all rows share along its tokens."""
        return self.sequence.positions(x) if self.sequence else x

    def embedded(self, table: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
        """Looks up tokens [B, T], and shards the result [B, T, D] along them.

        Each device of "model" has zeros for tokens in other devices' rows of the table. The result
        is first constrained to be unsharded, because XLA would otherwise reshard the indices.
        """
        if self.tensor is None:
            return table(tokens)
        if tokens.size > 1:
            return self._scattered(self._sharded(table(tokens), 0))
        # XLA makes a single token a slice, for which it would gather the sharded table.
        return self._scattered(self._sharded(table(jnp.repeat(tokens, 2, axis=1)), 0))[:, :1]

    def tokens(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, D] along its tokens over "seq"; with "model", `branch` does that."""
        return self.sequence.tokens(x) if self.sequence and not self.tensor else x

    def branch(self, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps attention or an MLP, [B, T, D] -> [B, T, D]: gathers tokens, scatters them after.

        The result's sums over the devices of "model" are reduced by that scatter.
        """
        if self.tensor is None:
            return fn
        return lambda x, *more: self._scattered(fn(self.gathered(x), *more))

    def gathered(self, x: jax.Array) -> jax.Array:
        """All-gathers the tokens of [B, T, D] over "model", before a product with sharded columns.

        The gradient is reduce-scattered.
        """
        if self.tensor is None or not self.shards_tokens:
            return x
        return _resharded(x, self._at(3), self._at(3, 1))

    def _scattered(self, x: jax.Array) -> jax.Array:
        """Reduce-scatters partial sums [B, T, D] over tokens, after a product with sharded rows.

        The gradient is all-gathered.
        """
        if not self.shards_tokens:
            return self._sharded(x, 0)
        return _resharded(x, self._at(3, 1), self._at(3))

    def features(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, F] along its features."""
        return self._sharded(x, 2)

    def heads(self, x: jax.Array) -> jax.Array:
        """Shards [B, T, H, d] along its heads."""
        return self._sharded(x, 2)

    def split(self, dense: nn.Dense, x: jax.Array, count: int) -> Sequence[jax.Array]:
        """Computes `jnp.split(dense(x), count, -1)` of x [B, T, D] with sharded features."""
        if self.tensor is None:
            return jnp.split(dense(x), count, axis=-1)
        weights = dense.variables["params"]
        x, kernel, bias = nn.dtypes.promote_dtype(
            x, weights["kernel"], weights["bias"], dtype=dense.dtype
        )
        parts = jnp.einsum("btd,dnf->nbtf", x, self._columns(kernel, count))
        return [part + b for part, b in zip(parts, self._columns(bias, count), strict=True)]

    def _columns(self, weights: jax.Array, count: int) -> jax.Array:
        """Splits concatenated weights [..., count F] into [..., count, F] with sharded F.

        A kernel [D, count F] has sharded rows at rest, a bias [count F] is not sharded. The
        resharding moves shards between devices, in the gradient too.
        """
        assert self.tensor is not None
        mesh, axis, (*leading, width) = self.tensor.mesh, self.tensor.axis, weights.shape
        split = weights.reshape(*leading, count, width // count)
        columns = NamedSharding(mesh, PartitionSpec(*[None] * (split.ndim - 1), axis))
        rows = NamedSharding(mesh, PartitionSpec(axis) if leading else PartitionSpec())
        # The gradient is computed with sharded F; otherwise XLA would gather the activations.
        return lax.with_sharding_constraint(_resharded(split, columns, rows), columns)

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

    def _sharded(self, x: jax.Array, dimension: int) -> jax.Array:
        """Constrains x to be sharded over "model" as `_at` says."""
        return lax.with_sharding_constraint(x, self._at(x.ndim, dimension)) if self.tensor else x

    def _at(self, rank: int, dimension: int = 0) -> NamedSharding:
        """Returns a sharding of `dimension` over "model" (0: none), with unconstrained rows.

        On a mesh with the axis "seq", that axis shards tokens as well, before this one.
        """
        assert self.tensor is not None
        mesh, axis = self.tensor.mesh, self.tensor.axis
        entries: list[object] = [PartitionSpec.UNCONSTRAINED] + [None] * (rank - 1)
        if sequence_size(mesh) > 1:
            entries[1] = SEQUENCE
        if dimension:
            entries[dimension] = (SEQUENCE, axis) if entries[dimension] else axis
        return NamedSharding(mesh, PartitionSpec(*entries))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(x: jax.Array, of_x: NamedSharding, of_gradient: NamedSharding) -> jax.Array:
    """Constrains x and its gradient to separate shardings.

    A plain constraint would leave the gradient's partial sums to be all-reduced.
    """
    return lax.with_sharding_constraint(x, of_x)


def _resharded_fwd(
    x: jax.Array, of_x: NamedSharding, of_gradient: NamedSharding
) -> tuple[jax.Array, None]:
    return _resharded(x, of_x, of_gradient), None


def _resharded_bwd(
    of_x: NamedSharding, of_gradient: NamedSharding, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, of_gradient),)


_resharded.defvjp(_resharded_fwd, _resharded_bwd)
