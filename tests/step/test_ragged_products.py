"""A warning of products whose groups are of the global batch."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

EXPERTS, WIDTH = 4, 8
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 4, WIDTH)).astype(np.float32)}


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [B, T, D], w [E, D, D] -> [B, T, D]; a token's expert follows from its first number."""
    tokens = x.reshape(-1, WIDTH)
    chosen = jnp.floor(jnp.abs(10 * tokens[:, 0])).astype(jnp.int32) % EXPERTS
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    done = jax.lax.ragged_dot(tokens[order], w, sizes)  # the line
    return jnp.zeros_like(tokens).at[order].set(done).reshape(x.shape)


def by_row(x: jax.Array, w: jax.Array) -> jax.Array:
    every = jnp.broadcast_to(w, (len(x), *w.shape))  # vmap's rule takes nothing less
    return jax.vmap(lambda row, w: experts(row[None], w)[0])(x, every)


def create_state(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (EXPERTS, WIDTH, WIDTH))}
    return TrainState.create(apply_fn=lambda: None, params=params, tx=optax.sgd(0.1))


def step(function: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jax.checkpoint(function)(batch["x"], params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def said(caplog: pytest.LogCaptureFixture, zero: zerojax.Zero, function: Any) -> list[str]:
    """The warnings of a step, which computes what the plain one computes."""
    with caplog.at_level(logging.WARNING, "zerojax"):
        state, loss = zero(step(function))(zero.init(create_state, jax.random.key(0)), BATCH)
    want, plain = jax.jit(step(experts))(create_state(jax.random.key(0)), BATCH)
    np.testing.assert_allclose(loss, plain, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-4, atol=1e-5)
    return [record.getMessage() for record in caplog.records if "ragged_dot" in record.getMessage()]


def test_of_the_global_batch(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = said(caplog, zerojax.zero(stage=3), experts)
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith("# the line"))
    assert (
        f"ragged_dot at test_ragged_products.py:{number} runs on all rows on each of the 8"
        in warning
    )
    assert "zero.per_device(experts, replicated=[...])" in warning


def test_of_one_devices_rows_and_of_one_row(caplog: pytest.LogCaptureFixture) -> None:
    zero = zerojax.zero(stage=3)
    assert said(caplog, zero, zero.per_device(experts, replicated=[1])) == []
    assert said(caplog, zero, by_row) == []


def test_one_device(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, zerojax.zero(stage=0, mesh=zerojax.mesh(1)), experts) == []


def test_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    zero = zerojax.zero(stage=3)
    state = zero.init(create_state, jax.random.key(0))

    @zero.evaluate
    def predict(state: TrainState, batch: Any) -> Any:
        return experts(batch["x"], state.params["w"])

    with caplog.at_level(logging.WARNING, "zerojax"):
        predict(state, BATCH)
    assert any("predict: jax.lax.ragged_dot at" in r.getMessage() for r in caplog.records)
