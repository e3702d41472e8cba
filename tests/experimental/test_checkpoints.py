"""Checkpoints of a run whose quantized gradients have errors."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compile")


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(16, 128)), "y": rng.normal(size=(16, 160))}


def create(key: jax.Array) -> TrainState:
    params = {"kernel": jax.random.normal(key, (128, 160)), "bias": jax.numpy.zeros(160)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def step(state: TrainState, b: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        return ((b["x"] @ p["kernel"] + p["bias"] - b["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def nnx_create() -> Any:
    model = nnx.Linear(128, 160, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_step(model: Any, optimizer: Any, b: Any) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda m: ((m(b["x"]) - b["y"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return value


def zero_of(stage: int = 2, *, loco: bool = True, devices: int = 8) -> zerojax.Zero:
    return zerojax.zero(
        stage=stage,
        stage3_param_persistence_threshold=0,
        mesh=zerojax.mesh(devices),
        zero_quantized_gradients=True,
        zeropp_loco_param={"err_beta": 0.8} if loco else None,
    )


def leaves(state: Any) -> list[Any]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_restart_goes_on_bit_for_bit(stage: int, tmp_path: Path) -> None:
    zero = zero_of(stage)
    train, state = zero(step), zero.init(create, jax.random.key(0))
    for i in range(2):
        state, _ = train(state, batch(i))
    with Checkpointer(tmp_path, zero) as ckpt:
        ckpt.save(2, state)
    for i in range(2, 4):
        state, _ = train(state, batch(i))
    again = zero_of(stage)
    with Checkpointer(tmp_path, again) as ckpt:
        restored = ckpt.restore(again.abstract_state(create, jax.random.key(0)))
    assert np.abs(restored.tx.numbers.error["kernel"][0]).max() > 0
    train = again(step)
    for i in range(2, 4):
        restored, _ = train(restored, batch(i))
    for got, want in zip(leaves(restored), leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_nnx_too(tmp_path: Path) -> None:
    zero = zero_of()
    train, (model, optimizer) = zero(nnx_step), zero.init(nnx_create)
    train(model, optimizer, batch(0))
    with Checkpointer(tmp_path, zero) as ckpt:
        ckpt.save(1, (model, optimizer))
        restored = ckpt.restore(zero.abstract_state(nnx_create))
    train(model, optimizer, batch(1))
    train(*restored, batch(1))
    for got, want in zip(
        leaves(nnx.state(restored)), leaves(nnx.state((model, optimizer))), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"loco": False}, {}),
        ({"devices": 4}, {}),
        ({}, {"loco": False}),
        ({}, {"devices": 2}),
    ],
    ids=["newly on", "on more devices", "off", "on fewer devices"],
)
def test_errors_that_do_not_fit_start_from_zero(
    before: Any, after: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zero, again = zero_of(**before), zero_of(**after)
    state, _ = zero(step)(zero.init(create, jax.random.key(0)), batch(0))
    with Checkpointer(tmp_path, zero) as ckpt:
        ckpt.save(1, state)
    with Checkpointer(tmp_path, again) as ckpt, caplog.at_level(logging.WARNING, "zerojax"):
        restored = ckpt.restore(again.abstract_state(create, jax.random.key(0)))
    for got, want in zip(leaves(restored.params), leaves(state.params), strict=True):
        np.testing.assert_array_equal(got, want)
    if after.get("loco") is False:
        assert restored.tx.numbers.error is None
    else:
        (error,) = restored.tx.numbers.error["kernel"]
        assert error.shape[0] == after.get("devices", 8)
        assert not np.any(error)
        assert "start from zero" in caplog.text
    restored, value = again(step)(restored, batch(1))
    assert np.isfinite(value)
