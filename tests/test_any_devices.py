"""A step on a number of devices that divides nothing computes what the plain one computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_near, host, zero_for
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64", "padded_however_small")

OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
    "noise": optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(1e-2)),
    "clipped": optax.chain(optax.clip_by_block_rms(0.001), optax.adam(1e-2)),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "sm3": optax.sm3(1e-2),
}


@pytest.fixture
def padded_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays, which otherwise stay replicated where no dimension divides, are padded too."""
    monkeypatch.setattr(rule, "SMALL", 0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adafactor", "clipped") else pytest.param(name, marks=pytest.mark.sweep)
        for name in OPTIMIZERS
    ],
)
def test_an_optimizer_that_reads_shapes_sees_no_padding(name: str) -> None:
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(10, 20)), "down": rng.normal(size=(20, 10))}
    batches = rng.normal(size=(4, 14, 10))

    def create() -> TrainState:
        placed = jax.tree.map(jnp.asarray, params)
        return TrainState.create(apply_fn=None, params=placed, tx=OPTIMIZERS[name])

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            out = jnp.tanh(batch @ params["up"]) @ params["down"]
            return jnp.mean((out - batch) ** 2) + optax.tree.norm(params)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    zero = zerojax.zero(stage=1, mesh=zerojax.mesh(devices=7))
    state, plain, sharded = zero.init(create), jax.jit(train_step), zero(train_step)
    want = create()
    assert not zero.plan(state).plain
    for batch in batches:
        want, _ = plain(want, batch)
        state, _ = sharded(state, batch)
    assert_near(host(state.params), host(want.params), 1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_of_a_gradient_leaves_padding_out(stage: int) -> None:
    weights = np.random.default_rng(0).normal(size=(10, 20))
    batch = np.random.default_rng(1).normal(size=(14, 10))

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params={"w": weights}, tx=optax.sgd(1e-2))

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    zero = zero_for(stage, axes=7, gradient_clipping=1.0)
    state = zero.init(create)
    assert not zero.plan(state).plain
    state, _ = zero(train_step)(state, batch)
    want = optax.tree.norm(jax.grad(loss)({"w": weights}, batch))
    np.testing.assert_allclose(zerojax.telemetry(state)["grad_norm"], want, rtol=1e-6)


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 1, "offload_optimizer": "cpu"}])
def test_results_that_follow_from_a_parameter_shared_by_factors(options: dict[str, Any]) -> None:
    params = {"w": np.random.default_rng(0).normal(size=(60, 50)).astype(np.float32)}

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2))

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, Any]:
        out, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w["w"]) ** 2))(state.params)
        w = state.params["w"]
        return state.apply_gradients(grads=gradient), (out, gradient, w.T, w.sum(0), batch @ w)

    batch = np.ones((16, 60), np.float32)
    zero = zerojax.zero(**options)
    state, _ = zero(train_step)(zero.init(create), batch)
    state, found = zero(train_step)(state, batch)
    want, _ = jax.jit(train_step)(create(), batch)
    want, expected = jax.jit(train_step)(want, batch)
    assert_near(host(found), host(expected), 1e-5)
    evaluated = zero.evaluate(lambda state, batch: (state.params["w"].T, batch))(state, batch)
    assert_near(host(evaluated[0]), host(want.params["w"].T), 1e-5)


@pytest.mark.parametrize("devices", [pytest.param(3, marks=pytest.mark.sweep), 5])
def test_lookups_of_all_kinds(devices: int) -> None:
    """By row, along a row, in a batch of tables, and in windows that leave the table."""
    rng = np.random.default_rng(0)
    params = {
        "rows": rng.normal(size=(37, 22)),
        "along": rng.normal(size=(37, 22)),
        "tables": rng.normal(size=(11, 7, 6)),
        "windows": rng.normal(size=(37, 22)),
    }
    ids = rng.integers(38, size=(4, 30))

    def create() -> TrainState:
        placed = jax.tree.map(jnp.asarray, params)
        return TrainState.create(apply_fn=None, params=placed, tx=optax.sgd(1.0))

    def train_step(state: TrainState, ids: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            numbers = lax.GatherDimensionNumbers(
                offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
            )
            looked_up = [
                params["rows"].at[ids].get(mode="fill", fill_value=0),
                jnp.take_along_axis(params["along"], (ids % 22)[:, None].repeat(37, 1).T, 1),
                jax.vmap(lambda table, ids: table[ids], (0, None))(params["tables"], ids % 7),
                lax.gather(
                    params["windows"], ids[:, None], numbers, (3, 22), mode="fill", fill_value=0
                ),
            ]
            return sum(jnp.mean(jnp.sin(x)) for x in looked_up)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    zero = zerojax.zero(stage=2, mesh=zerojax.mesh(devices=devices))
    state, plain, sharded = zero.init(create), jax.jit(train_step), zero(train_step)
    want = create()
    for each in ids:
        want, value = plain(want, each)
        state, got = sharded(state, each)
        np.testing.assert_allclose(got, value, rtol=1e-9)
    assert_near(host(state.params), host(want.params), 1e-9)
