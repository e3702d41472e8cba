"""The time of a step that runs, here on the CPU devices of the tests."""

from typing import Any

import jax
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
