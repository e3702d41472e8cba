"""Small parameters: one all-gather for all of them, at every stage that cuts them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
ROWS = 16


@pytest.mark.parametrize(
    ("stage", "more"), [(3, {"gradient_accumulation_steps": 2}), (1, {"bf16": True})]
)
def test_one_gather_for_all(stage: int, more: dict[str, Any]) -> None:
    zero = zerojax.zero(stage=stage, stage3_param_persistence_threshold=0, **more)

    def create() -> TrainState:
        params = {f"scale_{i:03}": jnp.ones(8) for i in range(12)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    def loss(params: Any, x: Any) -> jax.Array:
        """Scales one after the other and side by side."""
        scales = list(params.values())
        for scale in scales[:4]:
            x = jnp.tanh(x * scale)
        return sum((jnp.mean((x @ scale - 1) ** 2) for scale in scales), start=jnp.zeros(()))

    @zero
    def step(state: TrainState, x: jax.Array) -> TrainState:
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    state = zero.abstract_state(create)
    assert set(jax.tree.leaves(zero.plan(state).params)) == {PartitionSpec("data")}
    text = step.lower(state, jax.ShapeDtypeStruct((ROWS, 8), "float32")).compile().as_text()
    (gather,) = [each for each in collectives(text) if each.kind == "all-gather"]
    assert gather.times == 1
    assert gather.moved_bytes == 12 * 8 * 4 * 7 / 8  # XLA for CPU gathers bf16 as float32
