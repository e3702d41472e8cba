"""Checksums of sharded arrays: every device adds up its shards, the host what the devices give.

No program has a collective: many small ones are in flight, and on virtual CPU devices each would
wait for threads that another one holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.checkpoint.checksum import checksum
from zerojax.plan import layout


def begin(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Starts the checksums of arrays; :func:`total` gives one from what is returned.

    Arrays in host memory pass through the devices block by block.
    """
    parts = {name: _parts(x) for name, x in arrays.items()}
    if jax.process_count() == 1:
        return parts
    return jax.jit(lambda t: jax.tree.map(lambda p: jnp.sum(p, dtype=jnp.uint32), t))(parts)


def total(parts: Any) -> int:
    """The checksum, waiting for the devices."""
    return int(np.sum(np.asarray(parts), dtype=np.uint32))


def _parts(x: jax.Array) -> jax.Array:
    """Uint32 [devices], or [] where the array lies on one device only."""
    sharding = x.sharding
    if len(sharding.device_set) == 1 or not isinstance(sharding, NamedSharding):
        return checksum(x)
    return _sharded(x, sharding.mesh, sharding.spec)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sharded(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    cuts = [layout.axes(entry) for entry in layout.full(spec, x.ndim)]
    used = {axis for cut in cuts for axis in cut}

    def of_shard(piece: jax.Array) -> jax.Array:
        start = [
            jax.lax.axis_index(cut) * size if cut else 0
            for cut, size in zip(cuts, piece.shape, strict=True)
        ]
        first = jnp.asarray(True)
        for axis in mesh.axis_names:
            first = first if axis in used else first & (jax.lax.axis_index(axis) == 0)
        return jnp.where(first, checksum(piece, start), jnp.uint32(0))[None]

    parts = PartitionSpec(tuple(mesh.axis_names))
    return jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=parts, check_vma=False)(x)
