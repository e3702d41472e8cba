"""How far ahead a program without loops gathers.

Nothing keeps XLA from gathering all parameters of an unrolled model where the program begins, since
none of them waits for anything; then all of them lie whole side by side. So a gather waits for a
product with parameters that were used a while before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zerojax.collectives.order import impossible
from zerojax.collectives.shard import Shard
from zerojax.devices.mesh import axis_size, batch_devices, sequence_size
from zerojax.plan import layout

AHEAD = 100_000_000
"""Elements of parameters between a use and the gathers that wait for it: half a layer of 7B, twice
DeepSpeed's default of stage3_prefetch_bucket_size. Less leaves products too short to hide them."""


class _Use(NamedTuple):
    """The number of elements that were used, and what was made with them, rows first."""

    elements: int
    result: jax.Array


class Window:
    """The uses of parameters in a program, in their order.

    Args:
      mesh: The devices.
      axis: The axis over which parameters are sharded, and the rows of a batch and their tokens: no
        other one exists.
    """

    def __init__(self, mesh: Mesh, axis: str) -> None:
        self._mesh, self._axis = mesh, axis
        self._parts = batch_devices(mesh), sequence_size(mesh)
        self._uses: list[_Use] = []

    @classmethod
    def of(cls, mesh: Mesh, axis: str) -> Window | None:
        """None where other axes share the rows, or cut what is computed."""
        return cls(mesh, axis) if axis_size(mesh, axis) == mesh.size else None

    def used(self, shards: Sequence[Shard], results: Iterable[Any]) -> None:
        """Notes that an equation has used parameters whole, and what it has made."""
        made, *more = [*results] or [None]
        if not shards or more:
            return
        if not isinstance(made, jax.Array) or not jnp.issubdtype(made.dtype, jnp.floating):
            return
        # [rows, ...], or [rows, tokens, ...] where tokens are shared too.
        cut = self._parts if self._parts[1] > 1 else self._parts[:1]
        sizes = zip(made.shape, cut, strict=False)
        if made.ndim > len(cut) and made.size and all(n % size == 0 for n, size in sizes):
            self._uses.append(_Use(sum(x.value.size for x in shards), made))

    def after(self, shard: Shard) -> jax.Array:
        """A shard, but not before a use that lies further back than ``AHEAD``.

        Each device waits for an element of its own rows, so that nothing is sent for it.
        """
        left, result = AHEAD, None
        for use in reversed(self._uses):
            left -= use.elements
            if left < 0:
                result = use.result
                break
        cut = layout.dimensions(shard.spec, self._axis)
        if result is None or len(cut) != 1 or shard.spec[cut[0]] != self._axis:
            return shard.value
        n, (at,), shape = self._mesh.size, cut, shard.value.shape
        if shape[at] % n:
            return shard.value
        first = self._first(result)
        first = lax.optimization_barrier(first)
        wait = lax.broadcast_in_dim(impossible(first), (n, shape[at] // n), (0,)).reshape(shape[at])
        wait = lax.with_sharding_constraint(wait, layout.sharding(self._mesh, (self._axis,)))
        held = jnp.where(
            lax.broadcast_in_dim(wait, shape, (at,)), jnp.zeros_like(shard.value), shard.value
        )
        return lax.with_sharding_constraint(held, layout.sharding(self._mesh, shard.spec))

    def _first(self, result: jax.Array) -> jax.Array:
        """An element of each device, of what lies by rows, or by rows and tokens."""
        rows, shared = self._parts
        if shared == 1:
            return result[(slice(None), *(0,) * (result.ndim - 1))].reshape(rows, -1)[:, 0]
        tokens = result[(slice(None), slice(None), *(0,) * (result.ndim - 2))]
        return tokens.reshape(rows, tokens.shape[0] // rows, shared, -1)[:, 0, :, 0].reshape(-1)
