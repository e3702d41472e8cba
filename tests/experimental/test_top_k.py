"""Top-k with error feedback, by its formula and on shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.experimental.top_k import top_k

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_nothing_is_lost() -> None:
    rng, tx = np.random.default_rng(0), top_k(0.1)
    grads = [rng.normal(size=(20, 30)).astype(np.float32) for _ in range(8)]
    state, passed = tx.init(jnp.zeros((20, 30))), np.zeros((20, 30), np.float32)
    for g in grads:
        before = np.asarray(state.error) + g
        u, state = jax.jit(tx.update)(g, state)
        u = np.asarray(u)
        assert np.count_nonzero(u) == 60
        assert np.abs(before[u == 0]).max() <= np.abs(u[u != 0]).min()
        passed += u
    np.testing.assert_allclose(passed + state.error, sum(grads), atol=1e-5)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_other_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        top_k(fraction)


def test_a_sharded_step_is_that_of_plain_jit() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 128)).astype(np.float32)}
    batch = rng.normal(size=(16, 64)).astype(np.float32)

    def step(state: TrainState, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(state.params)
        return state.apply_gradients(grads=grads), value

    def start() -> TrainState:
        tx = optax.chain(top_k(0.05), optax.sgd(0.5))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    got, want = start(), start()
    train, plain = zerojax.zero(stage=2)(step), jax.jit(step)
    for _ in range(3):
        got, _ = train(got, batch)
        want, _ = plain(want, batch)
    apart = np.abs(np.asarray(got.params["w"]) - np.asarray(want.params["w"]))
    assert np.mean(apart > 1e-6) < 1e-3  # a tie within rounding
    error = got.opt_state[0].error["w"]
    assert error.sharding.spec == got.params["w"].sharding.spec
