"""What GPUs are given to run."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_nothing_is_gathered_in_host_memory() -> None:
    """Adafactor's moments, which are too small to be sharded, are gathered on the way there."""

    def create() -> TrainState:
        params, tx = {"w": jnp.zeros((1024, 1024))}, optax.adafactor(1e-3)
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def step(state: TrainState, batch: jax.Array) -> TrainState:
        return state.apply_gradients(grads=jax.grad(loss)(state.params, batch))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((batch @ params["w"]) ** 2)

    zero = zerojax.zero(
        stage=3, mesh=zerojax.topology("h100"), offload_optimizer="cpu", offload_param="cpu"
    )
    batch = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    _, *updates = zero(step).programs(zero.abstract_state(create), batch)
    gathers = [
        line
        for update in updates
        for line in update.lowered.compile().as_text().splitlines()
        if re.search(r" all-gather(-start)?\(", line)
    ]
    assert gathers
    assert not [line for line in gathers if "S(5)" in line]
