"""A decorated step computes what the plain one computes on one device, over many steps."""

from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import check, zero_for
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

P = PartitionSpec
STAGES = (0, 1, 2, 3)
STEPS = 20


@pytest.mark.parametrize("stage", STAGES)
def test_twenty_steps(stage: int) -> None:
    """A plain state, placed when it first comes."""
    check("mlp", stage, steps=STEPS)


@pytest.mark.usefixtures("full_compile")
def test_under_xlas_default_optimizations() -> None:
    check("mlp", 3, 4, steps=STEPS)


@pytest.mark.parametrize(
    ("devices", "partition", "shape", "spec"),
    [
        (8, 4, (12, 7), P("data:(2)4", "data:(1)2")),
        (6, 2, (7, 10), P("data:(1)3", "data:(3)2")),
        (6, 3, (8, 9), P("data:(1)2", "data:(2)3")),
        (8, 4, (7, 5), None),  # nothing divides: no secondary shard, which the plan says
    ],
)
def test_secondary_shards_of_padded_arrays(
    devices: int, partition: int, shape: Any, spec: Any
) -> None:
    def create() -> TrainState:
        params = {"w": jnp.ones(shape)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def step(state: TrainState, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    options = {"zero_hpz_partition_size": partition, "small_array_size": 0}
    plan = zero_for(3, axes=devices, **options).plan(create())
    assert [leaf.spec for leaf in plan.leaves["params"]] == [spec or plan.params["w"]]
    assert len(plan.secondary()) == bool(spec)
    assert ("have no secondary shard" in str(plan)) != bool(spec)
    batch = np.ones((2 * devices, shape[0]), np.float32)
    emitted.check(
        emitted.Source(create, step, (batch,), rows=len(batch)), 3, 1, zerojax.mesh(devices),
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "stage", "k"), [(1, 3, 4), (2, 1, 4), (3, 3, 1), (5, 2, 1), (7, 1, 1), (7, 3, 2)]
)
@pytest.mark.parametrize("name", ["mlp", "tables", "odd", "average_in_state"])
def test_any_number_of_devices(name: str, devices: int, stage: int, k: int) -> None:
    """Padding is not seen, where nothing divides."""
    source = emitted.source(name, 32 // (devices * k) * devices * k)
    emitted.check(source, stage, k, zerojax.mesh(devices), small_array_size=0)


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_reads_shapes_sees_no_padding(name: str) -> None:
    def create() -> TrainState:
        params = {"up": jnp.ones((10, 20)), "down": jnp.ones((20, 10))}
        return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZERS[name])

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            out = jnp.tanh(batch @ params["up"]) @ params["down"]
            return jnp.mean((out - batch) ** 2) + optax.tree.norm(params)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    zero = zero_for(1, axes=7, small_array_size=0)
    assert not zero.plan(create()).plain
    source = emitted.Source(create, step, (np.ones((14, 10), np.float32),), rows=14)
    emitted.check(source, 1, 1, zero.mesh, small_array_size=0)


def test_the_norm_of_a_gradient_leaves_padding_out() -> None:
    weights = np.random.default_rng(0).normal(size=(10, 20))
    batch = np.random.default_rng(1).normal(size=(14, 10))

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    zero = zero_for(3, axes=7, gradient_clipping=1.0, small_array_size=0)
    state = TrainState.create(apply_fn=None, params={"w": weights}, tx=optax.sgd(1e-2))
    state = zero.init(lambda: state)
    assert not zero.plan(state).plain
    state, _ = zero(step)(state, batch)
    want = optax.tree.norm(jax.grad(loss)({"w": weights}, batch))
    np.testing.assert_allclose(zerojax.telemetry(state)["grad_norm"], want, rtol=1e-6)


def test_bfloat16_accumulated_in_float32() -> None:
    """Many small gradients after a large one would vanish in a bfloat16 sum."""

    def step(state: TrainState, rows: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.sum(params["w"] * rows.astype(jnp.bfloat16), axis=-1))

        grads = jax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {}

    zero = zero_for(2, 64, bf16=True)
    params = {"w": np.zeros(8, np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    rows = np.full((512, 8), 2.0**-9, np.float32)
    rows[:8] = 1.0
    state, _ = zero(step)(state, rows)
    np.testing.assert_allclose(state.params["w"], -rows.mean(0), rtol=1e-6)
