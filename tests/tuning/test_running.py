"""The time of a step that runs, here on the CPU devices of the tests."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import zerojax
from zerojax.tuning.running import seconds_of_a_step
from zerojax.tuning.workload import workload

pytestmark = pytest.mark.usefixtures("quick_compile")


class Small(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Dense(32)(nn.Embed(32, 16)(tokens))


def small_nnx() -> nnx.Module:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.out = nnx.Linear(16, 32, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.out(self.embed(tokens))

    return Model(nnx.Rngs(0))


@pytest.mark.parametrize("make", [Small, small_nnx])
def test_a_language_model(make: Any) -> None:
    zero = zerojax.zero(stage=3)
    assert seconds_of_a_step(zero, workload(make, zero, 8, 4), steps=2) > 0


def test_a_step_that_takes_a_key() -> None:
    def create_state(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
        model = small_nnx()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train_step(model: Any, optimizer: Any, batch: Any, key: Any) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean(model(batch) ** 2) * jax.random.uniform(key)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    made = zerojax.Workload(create_state, train_step, batch, args=(key,))
    assert seconds_of_a_step(zerojax.zero(stage=3), made, steps=1) > 0
