"""A small program with ZeRO-3's communication, compiled for eight H100s."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.devices.topology import topology

DIM, LAYERS = 1024, 4  # the tests count with these


@functools.cache
def compile_mlp(*, scan: bool, remat: bool) -> str:
    """Text of one SGD step of an MLP of DIM x DIM layers, each cut over eight devices.

    Each layer is cast to bf16 and gathered where it is used; its gradient is scattered.
    """
    mesh = topology("h100", devices=8)

    def sharding(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    constrain = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def gather(shard: jax.Array) -> jax.Array:
        return constrain(shard, sharding())

    def forward(shard: jax.Array) -> tuple[jax.Array, None]:
        return gather(shard), None

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (constrain(grad, sharding("data")),)

    gather.defvjp(forward, backward)

    def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.tanh(x @ gather(weight.astype(jnp.bfloat16)))

    if remat:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(lambda x, weight: (layer(x, weight), None), x, weights)
        else:
            for weight in weights:
                x = layer(x, weight)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    def abstract(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(*spec))

    weights: Any = [abstract((DIM, DIM), jnp.float32, "data")] * LAYERS
    if scan:
        weights = abstract((LAYERS, DIM, DIM), jnp.float32, None, "data")
    x = abstract((512, DIM), jnp.bfloat16, "data")
    out = jax.tree.map(lambda weight: weight.sharding, weights)
    return jax.jit(step, donate_argnums=0, out_shardings=out).lower(weights, x).compile().as_text()
