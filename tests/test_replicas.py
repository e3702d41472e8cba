"""Replica groups: the batch lies over "replica" and "data", the state over "data" alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import start, zero_for
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

AXES = {"replica": 2, "data": 4}


def created(zero: zerojax.Zero, name: str, dtype: str = "float64") -> Any:
    state = start(name, dtype)
    return zero.init(lambda: state)


def test_the_state_is_cut_within_a_group_and_copied_between_groups() -> None:
    zero = zero_for(3, axes=AXES)
    state = created(zero, "mlp")
    for x in jax.tree.leaves(state.params):
        assert len(x.addressable_shards) == 8
        assert len({str(shard.index) for shard in x.addressable_shards}) == 4
    title = str(zero.plan(state)).splitlines()[0]
    assert title == "ZeRO stage 3 over 4 devices (axis 'data') in each of 2 replica groups"
    title = str(zero_for(0, axes=AXES).plan(state)).splitlines()[0]
    assert title == "ZeRO stage 0: a full state on each of 8 devices"


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_groups_send_each_other_shards_of_gradients() -> None:
    wide = 512

    def create() -> TrainState:
        shapes = {"in": (wide, 4 * wide), "out": (4 * wide, wide)}
        params = {name: jnp.zeros(shape, "float32") for name, shape in shapes.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState, x: jax.Array) -> TrainState:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    zero = zerojax.zero(stage=3, mesh=zerojax.topology("h100", devices=8, axes=AXES))
    x = jax.ShapeDtypeStruct((64, wide), jnp.float32)
    text = zero(step).lower(zero.abstract_state(create), x).compile().as_text()
    between = [x for x in collectives(text) if x.kind == "all-reduce" and x.payload_bytes > wide]
    elements = 2 * 4 * wide * wide // AXES["data"]
    assert [(x.group_size, x.payload_bytes) for x in between] == [(2, 4 * elements)]


def test_an_evaluation_is_spread_over_both_axes() -> None:
    zero = zero_for(3, axes=AXES, train_micro_batch_size_per_gpu=2)
    state = created(zero, "mlp")
    x = np.random.default_rng(0).normal(size=(13, 16))

    @zero.evaluate
    def predict(state: TrainState, x: jax.Array) -> Any:
        out = state.apply_fn({"params": state.params}, x)
        return out, jnp.mean(out)

    bare = start("mlp", "float64")
    want = bare.apply_fn({"params": bare.params}, x)
    out, mean = predict(state, x)
    np.testing.assert_allclose(out, want, rtol=1e-9)
    np.testing.assert_allclose(mean, np.mean(want), rtol=1e-9)


def test_the_config_makes_the_groups() -> None:
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    assert dict(zerojax.zero(config).mesh.shape) == {"replica": 2, "data": 4}
    assert dict(zerojax.zero(stage=1, mics_shard_size=2).mesh.shape) == {"replica": 4, "data": 2}
    given = zerojax.zero(config, mesh=zerojax.mesh(axes={"replica": 2, "data": 4}))
    assert dict(given.mesh.shape) == {"replica": 2, "data": 4}
    for off in (-1, 0):
        assert dict(zerojax.zero(stage=3, mics_shard_size=off).mesh.shape) == {"data": 8}
