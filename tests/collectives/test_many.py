"""Small parameters: one all-gather for all of them, at every stage that cuts them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec
from jaxprs import gathers

import zerojax
from zerojax.collectives import Shard, many
from zerojax.collectives.insert import Inserter
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
ROWS = 16
SHAPES = [(8,), (2, 8), (8, 3), (3, 8, 2)]
SPECS = [("data",), (None, "data"), ("data", None), (None, "data", None)]


def test_each_comes_back_as_it_was() -> None:
    values = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(SHAPES)]
    values += [x.astype(np.float16) for x in values]
    inserter = Inserter(MESH, "data", keep=False)

    def run(values: list[jax.Array]) -> Any:
        shards = [Shard(x, spec) for x, spec in zip(values, SPECS * 2, strict=True)]
        return many.gather_together(shards, MESH, inserter.constrain)

    with jax.enable_x64(True):
        assert [move.dtype for move in gathers(jax.make_jaxpr(run)(values))] == [
            "float64",
            "float16",
        ]
        for got, want in zip(jax.jit(run)(values), values, strict=True):
            assert got.sharding.is_fully_replicated
            np.testing.assert_array_equal(got, want)


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
