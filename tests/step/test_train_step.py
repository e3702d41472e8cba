"""A step as its author calls it: under what jax offers to find faults, and where it is called
wrongly."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.plan.stored import StoredArray

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, WIDTH, WIDE = 16, 83, 101
"""No device count divides a matrix [WIDTH, WIDE], which is just large enough to be sharded."""

OPTIONS: dict[str, Callable[[], Any]] = {
    "debug_nans": lambda: jax.debug_nans(True),
    "checking_leaks": jax.checking_leaks,
    "disable_jit": jax.disable_jit,
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3, "check_finite": True},
    "fp16": {"stage": 1, "fp16": True, "initial_scale_power": 8},
}


def create(option: str) -> TrainState:
    rng = np.random.default_rng(0)
    shapes = {"into": (WIDTH, WIDE), "out": (WIDE, 8), "bias": (8,)}
    params = {
        name: jnp.asarray(rng.normal(size=shape) / 10, jnp.float32)
        for name, shape in shapes.items()
    }
    # optax's Adam mixes dtypes itself.
    tx = optax.sgd(1e-2, momentum=0.9) if option == "dtype_promotion" else optax.adamw(1e-2)
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def batch() -> Any:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(ROWS, 8))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def loss_of(p: Any, b: Any) -> jax.Array:
    out = jnp.tanh(b["x"].astype(p["into"].dtype) @ p["into"]) @ p["out"] + p["bias"][None]
    return jnp.mean((out.astype(jnp.float32) - b["y"]) ** 2)


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    loss, grads = zerojax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def trained(config: dict[str, Any], option: str) -> Any:
    zero = zerojax.zero(stage3_param_persistence_threshold=0, **config)
    state, step = zero.init(lambda: create(option)), zero(train_step)
    if config["stage"]:
        assert isinstance(state.params["into"], StoredArray)
    for _ in range(2):
        state, loss = step(state, batch())
    value = zero.evaluate(lambda state, batch: loss_of(state.params, batch))(state, batch())
    told = zerojax.telemetry(state)
    assert np.isnan(told["learning_rate"])
    assert int(told["step"]) == 2
    step.close()
    norm = float(optax.tree.norm(jax.device_get(state.params)))
    return jax.tree.map(np.asarray, (dict(state.params), loss, value, norm))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "config"), [*((option, "stage 3") for option in OPTIONS), ("debug_nans", "fp16")]
)
def test_under_what_jax_offers_to_find_faults(option: str, config: str) -> None:
    want = trained(CONFIGS[config], option)
    with OPTIONS[option]():
        got = trained(CONFIGS[config], option)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
