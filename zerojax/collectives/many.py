"""Small parameters, gathered together: one all-gather for all of a dtype.

A collective has a fixed cost regardless of its size, and small parameters take little memory: the
scale of a norm, a bias, see :func:`zerojax.plan.rule.is_small`. So they are gathered once a step,
at stage 3 too: concatenated in one matrix with a row per device, gathered, and split again. Between
steps they stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zerojax.collectives.ledger import Ledger
from zerojax.collectives.shard import Shard
from zerojax.plan import layout
from zerojax.plan.layout import Spec


def gather_together(
    shards: Sequence[Shard],
    mesh: Mesh,
    constrain: Callable[[jax.Array, Spec], jax.Array],
    ledger: Ledger | None = None,
) -> list[jax.Array]:
    """Gathers shards, by one all-gather for all shards of a dtype and axis.

    Args:
      shards: Shards of any shapes and dtypes, each small by :func:`zerojax.plan.rule.is_small`.
      mesh: The devices.
      constrain: Constrains an array to a spec.
      ledger: Records the gathers, if given.
    """
    ledger = Ledger(mesh) if ledger is None else ledger
    arrays = [shard.value for shard in shards]
    kinds = [(shard.value.dtype, next(filter(None, shard.spec))) for shard in shards]
    for kind in dict.fromkeys(kinds):
        chosen, (_, axis) = [i for i, each in enumerate(kinds) if each == kind], kind
        devices = layout.parts(axis, mesh)
        dims = [shards[i].spec.index(axis) for i in chosen]
        # The shards are constrained to their specs first, else XLA may move a cast past the gather.
        pinned = [constrain(arrays[i], shards[i].spec) for i in chosen]
        rows = [_to_rows(x, dim, devices) for x, dim in zip(pinned, dims, strict=True)]
        matrix = constrain(jnp.concatenate(rows, axis=1), (axis, None))
        with ledger.gathers(matrix, (axis, None), (None, None)):
            matrix = constrain(matrix, (None, None))
        start = 0
        for i, row, dim in zip(chosen, rows, dims, strict=True):
            block = lax.slice_in_dim(matrix, start, start + row.shape[1], axis=1)
            # Without a barrier XLA's layout differs from that of a parameter gathered separately.
            arrays[i] = lax.optimization_barrier(_from_rows(block, arrays[i].shape, dim))
            start += row.shape[1]
    return arrays


def _to_rows(x: jax.Array, dim: int, devices: int) -> jax.Array:
    return jnp.moveaxis(x, dim, 0).reshape(devices, -1)


def _from_rows(rows: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    moved = shape[dim], *shape[:dim], *shape[dim + 1 :]
    return jnp.moveaxis(rows.reshape(moved), 0, dim)
