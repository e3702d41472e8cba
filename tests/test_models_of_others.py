"""Models that others wrote train as they are: flax's way of writing them."""

from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import PartitionSpec

import zerojax

VOCABULARY, WINDOW = 96, 8
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(16, WINDOW + 1)).astype(np.int32)
Make = Callable[[], nnx.Module]

pytestmark = pytest.mark.usefixtures("quick_compile")


class Block(nnx.Module):
    """Attention and a gated layer, cut over "heads" and "mlp"."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        rows = nnx.with_partitioning(init, ("embed", "mlp"))
        columns = nnx.with_partitioning(init, ("mlp", "embed"))
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 32, use_bias=False, decode=False, rngs=rngs,
            kernel_init=nnx.with_partitioning(init, ("embed", "heads", None)),
        )  # fmt: skip
        self.gate = nnx.Linear(32, 64, use_bias=False, kernel_init=rows, rngs=rngs)
        self.up = nnx.Linear(32, 64, use_bias=False, kernel_init=rows, rngs=rngs)
        self.down = nnx.Linear(64, 32, use_bias=False, kernel_init=columns, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.silu(self.gate(x)) * self.up(x))


class Decoder(nnx.Module):
    """Called as tunix's: tokens, positions, cache and mask to logits and cache."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        table = nnx.initializers.normal(0.02)(rngs.params(), (VOCABULARY, 32))
        self.embedding = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.layers = nnx.List([Block(rngs)])

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: None, mask: jax.Array
    ) -> tuple[jax.Array, None]:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = nnx.remat(Block.__call__)(layer, x, mask[:, None])
        return x @ self.embedding[...].T, cache


def decoder() -> Decoder:
    with nnx.use_eager_sharding(False):
        return Decoder(nnx.Rngs(0))


def train_step(model: Any, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(WINDOW), inputs.shape)
    causal = jnp.tril(jnp.ones((WINDOW, WINDOW), bool))
    mask = jnp.broadcast_to(causal, (*inputs.shape, WINDOW))

    def loss_fn(model: Any) -> jax.Array:
        logits, _ = model(inputs, positions, None, mask)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def pair(make: Make) -> tuple[nnx.Module, nnx.Optimizer]:
    model = make()
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


SOURCE = emitted.Source(lambda: pair(decoder), train_step, (TOKENS,), emitted.in_arguments, rows=16)


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (3, 2)])
def test_annotations_for_axes_that_do_not_exist_are_left_out_on_request(
    stage: int, accumulation: int
) -> None:
    emitted.check(SOURCE, stage, accumulation, specs=PartitionSpec())
    model, _ = zero_for(stage, specs=PartitionSpec()).init(lambda: pair(decoder))
    spec = model.layers[0].gate.kernel[...].sharding.spec
    assert ("data" in spec) == (stage > 0)


def test_annotations_are_kept_where_rules_map_them() -> None:
    rules = (("vocab", "tp"), ("heads", "tp"), ("mlp", "tp"), ("embed", None))
    mesh = zerojax.mesh(axes={"data": 4, "tp": 2})
    with logical_axis_rules(rules):
        emitted.check(SOURCE, mesh=mesh)
        model, _ = zero_for(3, mesh=mesh).init(lambda: pair(decoder))
    assert model.embedding[...].sharding.spec == PartitionSpec("tp", "data")


def test_annotations_for_axes_that_do_not_exist_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"'embedding'.*'vocab'.*specs=PartitionSpec\(\)"):
        zerojax.zero(stage=3).init(lambda: pair(decoder))
