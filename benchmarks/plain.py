"""Plain ``jax.jit`` of a training step, with its state sharded in the way of FSDP."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PERSISTENCE_THRESHOLD = 100_000  # elements; DeepSpeed's default


def fsdp_sharding(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Shards the largest dimension that the devices divide; small leaves are replicated."""
    spec: list[str | None] = [None] * len(leaf.shape)
    divisible = [at for at, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if leaf.size >= PERSISTENCE_THRESHOLD and divisible:
        spec[max(divisible, key=lambda at: leaf.shape[at])] = "data"
    return NamedSharding(mesh, PartitionSpec(*spec))


def plain_jit(
    step: Callable[..., Any],
    mesh: Mesh,
    state: Any,
    *further: Any,
    shard: Callable[[Mesh, Any], NamedSharding] = fsdp_sharding,
) -> jax.stages.Wrapped:
    """``jax.jit`` of a step whose state and further arguments ``shard`` places.

    The batch has rows over all devices, metrics are replicated, and the state is donated.
    """
    place = functools.partial(jax.tree.map, functools.partial(shard, mesh))
    rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    return jax.jit(
        step,
        in_shardings=(place(state), rows, *map(place, further)),
        out_shardings=(place(state), replicated),
        donate_argnums=0,
    )


def count(params: Any) -> int:
    """Elements of all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
