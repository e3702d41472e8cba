"""Parameters that stay gathered over an update at stage 3."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_near, host, start, zero_for
from flax.training.train_state import TrainState

import zerojax
from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile", "all_are_large")
ALL = 10**12


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise parameters as small as these are gathered together in any case."""
    monkeypatch.setattr(rule, "SMALL", 0)


@pytest.mark.parametrize(
    ("keywords", "live"),
    [
        ({}, True),
        ({"stage3_max_live_parameters": 200}, True),  # some of them alone
        ({"mics_shard_size": 4}, True),
        ({"offload_optimizer": "cpu"}, True),
        ({"offload_param": "cpu"}, False),
        ({"stage3_max_live_parameters": 0}, False),
    ],
)
def test_what_the_plan_keeps_gathered(keywords: dict[str, Any], live: bool) -> None:
    zero = zero_for(**{"stage3_max_live_parameters": ALL} | keywords)
    assert bool(zero.plan(start("mlp", "float32")).live) == live


@pytest.mark.parametrize("accumulation", [1, 4])
def test_overflows_of_fp16_are_those_without(accumulation: int) -> None:
    """Losses, scales and skipped steps bit by bit."""

    def create() -> TrainState:
        params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float32)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def step(state: TrainState, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(x.astype(jnp.float16) @ params["w"]).astype(jnp.float32) ** 2)

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    runs = []
    for live in (0, ALL):
        zero = zero_for(
            3, accumulation, stage3_max_live_parameters=live, fp16=True, initial_scale_power=24,
            hysteresis=1,
        )  # fmt: skip
        state, decorated, told = zero.init(create), zero(step), []
        assert bool(zero.plan(state).live) == (live > 0)
        for x in np.random.default_rng(0).normal(size=(8, 32, 16)):
            state, loss = decorated(state, x)
            seen = zerojax.telemetry(state)
            told.append([float(loss), float(seen["loss_scale"]), float(seen["skipped_steps"])])
        runs.append((np.array(told), np.asarray(state.params["w"])))
    assert runs[0][0][-1, 2] > 1
    np.testing.assert_array_equal(runs[1][0][:, 1:], runs[0][0][:, 1:])
    np.testing.assert_allclose(runs[1][0][:, 0], runs[0][0][:, 0], rtol=1e-6)
    np.testing.assert_allclose(runs[1][1], runs[0][1], rtol=1e-5, atol=1e-7)


def test_an_evaluation_of_such_a_state() -> None:
    zero = zero_for(stage3_max_live_parameters=ALL)
    state = start("mlp", "float32")
    predict = zero.evaluate(lambda state, x: state.apply_fn({"params": state.params}, x))
    x = np.random.default_rng(0).normal(size=(13, 16)).astype(np.float32)
    want = state.apply_fn({"params": state.params}, x)
    assert_near(host(predict(state, x)), host(want), 1e-5)
