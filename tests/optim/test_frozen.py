"""Gradients that an optimizer does not use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.optim.frozen import TracedUpdate

PARAMS = {"base": jnp.ones((4, 2)), "w": jnp.ones(3)}
LABELS = {"base": "still", "w": "moves"}
MASK = {"base": True, "w": False}
ADAM = optax.adamw(0.1)


def frozen(tx: optax.GradientTransformation = ADAM) -> optax.GradientTransformation:
    return optax.partition({"moves": tx, "still": optax.set_to_zero()}, LABELS)


OPTIMIZERS = {
    "partition": (frozen(), False),
    "multi_transform": (
        optax.multi_transform({"moves": ADAM, "still": optax.set_to_zero()}, LABELS), False,
    ),
    "set to zero last": (optax.chain(ADAM, optax.masked(optax.set_to_zero(), MASK)), True),
    "set to zero first": (optax.chain(optax.masked(optax.set_to_zero(), MASK), ADAM), False),
    "stateless, set to zero last": (
        optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), MASK)), False,
    ),
    "a norm of what moves": (frozen(optax.chain(optax.clip_by_global_norm(1.0), ADAM)), False),
    "a norm of all": (optax.chain(optax.clip_by_global_norm(1.0), frozen()), True),
    "a mask, whose rest passes": (optax.masked(ADAM, {"base": False, "w": True}), True),
    "several steps summed": (optax.MultiSteps(frozen(), 2).gradient_transformation(), True),
    "finite or skipped": (optax.apply_if_finite(frozen(), 3), True),
    "a learning rate in the state": (
        frozen(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)), False,
    ),
    "nothing frozen": (ADAM, True),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uses(name: str) -> None:
    tx, of_base = OPTIMIZERS[name]
    state = tx.init(PARAMS)
    update = TracedUpdate(lambda grads: tx.update(grads, state, PARAMS), PARAMS)
    assert update.uses == [of_base, True]
    given = jax.tree.map(lambda p: 3 * p, PARAMS)  # other values than those of the trace
    jax.tree.map(np.testing.assert_array_equal, update(given), tx.update(given, state, PARAMS))

    def traced(grads: Any, state: Any, params: Any) -> Any:
        update = TracedUpdate(lambda grads: tx.update(grads, state, params), grads)
        assert update.uses == [of_base, True]
        return update(grads)

    got, want = jax.jit(traced)(given, state, PARAMS), jax.jit(tx.update)(given, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def gradients(base: float) -> Any:
    return {"base": jnp.full((4, 2), base), "w": jnp.array([3.0, 4.0, 0.0])}


@pytest.mark.parametrize("base", [0.0, 100.0, jnp.nan, jnp.inf])
@pytest.mark.parametrize("jit", [False, True])
def test_a_frozen_gradient_counts_for_nothing(base: float, jit: bool) -> None:
    tx = zerojax.wrap(
        frozen(optax.sgd(1.0)), gradient_clipping=1.0, loss_scale=zerojax.LossScale(loss_scale=2.0)
    )
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update(gradients(base), tx.init(PARAMS), PARAMS)
    assert state.grad_norm == 2.5  # of w, without the scale
    assert state.skipped == 0
    np.testing.assert_allclose(updates["w"], [-0.6, -0.8, 0.0], rtol=1e-5)
    np.testing.assert_array_equal(updates["base"], 0)


def test_a_gradient_that_is_used_counts() -> None:
    tx = zerojax.wrap(frozen(optax.sgd(1.0)), skip_nonfinite=True)
    grads = gradients(1.0) | {"w": jnp.full(3, jnp.nan)}
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert state.skipped == 1
    np.testing.assert_array_equal(updates["w"], 0)
    every = zerojax.wrap(optax.chain(optax.clip_by_global_norm(1.0), frozen(optax.sgd(1.0))))
    _, state = every.update(gradients(5.0), every.init(PARAMS), PARAMS)
    assert state.grad_norm == 15.0  # sqrt(25 + 8 * 25)
