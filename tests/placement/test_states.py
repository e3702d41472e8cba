"""States whose arrays a step may take, and those that it has to copy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


class Averaged(TrainState):  # type: ignore[misc]
    average: Any = None


def create() -> Averaged:
    params = {"w": jnp.ones((60, 50)), "v": jnp.ones((64, 8))}
    return Averaged.create(apply_fn=None, params=params, average=params, tx=optax.adam(1e-2))


def train_step(state: Averaged, batch: jax.Array) -> Averaged:
    grads = jax.grad(lambda p: jnp.sum((batch @ p["w"]) ** 2) + jnp.sum(p["v"] ** 2))(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(average=optax.incremental_update(state.params, state.average, 0.1))


@pytest.mark.parametrize(
    ("devices", "options"),
    [(8, {"stage": 3}), (8, {"stage": 1}), (7, {"stage": 1})],
    ids=["plain", "shared", "padded"],
)
def test_an_array_that_stands_in_the_state_twice(devices: int, options: dict[str, Any]) -> None:
    zero = zerojax.zero(mesh=zerojax.mesh(devices=devices), **options)
    step, plain = zero(train_step), jax.jit(train_step)
    batch = np.ones((devices, 60), np.float32)
    state, want = step(zero.init(create), batch), plain(create(), batch)
    state, want = (x.replace(average=x.params) for x in (state, want))
    state, want = step(state, batch), plain(want, batch)
    for a, b in zip(jax.tree.leaves(state.average), jax.tree.leaves(want.average), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_init_traces_create_state_once(device: str) -> None:
    times = 0

    def counted() -> Averaged:
        nonlocal times
        times += 1
        return create()

    zero = zerojax.zero(
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
    )
    state = zero.init(counted)
    assert times == 1
    np.testing.assert_array_equal(state.params["v"], np.ones((64, 8)))


class Heads(nn.Module):
    """A kernel that flax makes as a matrix, with names for its final shape."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, "model"))
        return nn.DenseGeneral((2, 8), kernel_init=kernel, use_bias=False)(x)


def heads() -> TrainState:
    variables = Heads().init(jax.random.key(0), jnp.ones((1, 16)))
    return TrainState.create(apply_fn=None, params=variables["params"], tx=optax.sgd(0.1))


class Annotated(nnx.Module):
    def __init__(self) -> None:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(16, 8, kernel_init=kernel, rngs=nnx.Rngs(0))


def test_init_passes_settings_as_they_are() -> None:
    """A rate that the optimizer keeps outlives the trace of ``create``."""

    def create(key: jax.Array, model: nn.Module, rate: float, sizes: dict[str, int]) -> TrainState:
        params = model.init(key, jnp.zeros((1, sizes["in"])))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(rate))

    def step(state: TrainState, batch: jax.Array) -> TrainState:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    arguments = jax.random.key(0), nn.Dense(4), 0.1, {"in": 8}
    zero, batch = zerojax.zero(stage=3), np.ones((8, 8), np.float32)
    assert zero.abstract_state(create, *arguments).params["kernel"].shape == (8, 4)
    got = zero(step)(zero.init(create, *arguments), batch).params["kernel"]
    want = jax.jit(step)(create(*arguments), batch).params["kernel"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_an_initializer_sees_no_mesh() -> None:
    """But for those of NNX that demand one."""
    zero = zerojax.zero(mesh=zerojax.mesh(axes={"data": 4, "model": 2}), stage=1)
    state = zero.init(heads)
    (kernel,), (want,) = jax.tree.leaves(state.params), jax.tree.leaves(heads().params)
    assert kernel.sharding.spec == jax.P("data", None, "model")
    np.testing.assert_allclose(kernel, want, rtol=1e-5)
    model, _ = zero.init(
        lambda: (m := Annotated(), nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param))
    )
    assert model.linear.kernel.get_value().sharding.spec == jax.P("data", "model")
    assert model.linear.kernel.eager_sharding
    spec = zero.abstract_state(heads).params["DenseGeneral_0"]["kernel"].value.sharding.spec
    assert spec == jax.P("data", None, "model")


@pytest.mark.parametrize(("arrays", "warned"), [(3, False), (60, True)])
def test_only_many_bytes_that_cannot_be_split_are_a_warning(
    arrays: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Arrays of 90 x 90 elements are neither split in seven nor padded."""
    zero = zero_for(3, mesh=zerojax.mesh(devices=7))
    params = {str(i): jax.ShapeDtypeStruct((90, 90), jnp.float32) for i in range(arrays)}
    plan = zero.plan(params)
    assert "arrays have no dimensions that all of 7 devices divide" in plan.lost
    assert ("7 devices divide" in caplog.text) == warned
