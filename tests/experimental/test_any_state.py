"""A 1-bit optimizer on a state that is any pytree: the numbers of a ``TrainState``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = {
    "train_batch_size": 16,
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}},
}
X = np.random.default_rng(0).normal(size=(16, 96)).astype("f4")


def params() -> Any:
    return {"w": jnp.sin(jnp.arange(96.0 * 96)).reshape(96, 96)}


def loss_of(params: Any, x: Any) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) - 1))


def test_momentum_is_sent_in_one_bit() -> None:
    zero = zerojax.zero(CONFIG)
    tx = zero.optimizer()

    @zero
    def pair(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @zero
    def train_state(state: TrainState, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    p, s = zero.init(lambda: (params(), tx.init(params())))
    state = zero.init(lambda: TrainState.create(apply_fn=None, params=params(), tx=tx))
    for _ in range(5):
        p, s, loss = pair(p, s, X)
        state, want = train_state(state, X)
        np.testing.assert_array_equal(loss, want)
    assert s.error["w"]
    jax.tree.map(np.testing.assert_array_equal, p, state.params)


def test_an_optimizer_of_the_step_is_refused() -> None:
    tx = optax.adam(1e-2)

    @zerojax.zero(CONFIG)
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with pytest.raises(ValueError, match=r"OneBitAdam.*zero.optimizer\(\)"):
        step(params(), tx.init(params()), X)
