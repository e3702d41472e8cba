"""The norm of the gradients is computed unless the config turns it off, or where an update needs
it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.optim.norm import NORM

pytestmark = pytest.mark.usefixtures("quick_compile")

BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
TX = optax.adam(0.1)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def params() -> dict[str, jax.Array]:
    return {"w": jnp.ones((8, 24)), "b": jnp.ones(24)}


def train_state(state: TrainState, batch: Any) -> TrainState:
    return state.apply_gradients(grads=jax.grad(loss_of)(state.params, batch))


def pair(state: Any, batch: Any) -> Any:
    updates, opt_state = TX.update(jax.grad(loss_of)(state[0], batch), state[1], state[0])
    return optax.apply_updates(state[0], updates), opt_state


FORMS: dict[str, tuple[Any, Any]] = {
    "TrainState": (
        train_state,
        lambda: TrainState.create(apply_fn=None, params=params(), tx=TX),
    ),
    "pair": (pair, lambda: (params(), TX.init(params()))),
}


def trained(form: str, **config: Any) -> tuple[Any, float, str]:
    """The state after a step, the norm by telemetry, and the names of the compiled operations."""
    step, create = FORMS[form]
    zero = zerojax.zero(stage=2, **config)
    decorated, state = zero(step), zero.init(create)
    text = decorated.lower(state, BATCH).compile().as_text()
    state = decorated(state, BATCH)
    return state, float(zerojax.telemetry(decorated)["grad_norm"]), text


def parameters(state: Any) -> Any:
    return state.params if isinstance(state, TrainState) else state[0]


@pytest.mark.parametrize("form", FORMS)
def test_turned_off(form: str) -> None:
    want, norm, text = trained(form)
    assert norm == pytest.approx(float(optax.tree.norm(jax.grad(loss_of)(params(), BATCH))))
    assert NORM in text
    got, unknown, text = trained(form, compute_grad_norm=False)
    assert math.isnan(unknown)
    assert NORM not in text
    for x, y in zip(*map(jax.tree.leaves, map(parameters, (got, want))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("config", [{"gradient_clipping": 1.0}, {"check_finite": True}])
def test_updates_that_need_the_norm_compute_it(config: dict[str, Any]) -> None:
    _, norm, text = trained("TrainState", compute_grad_norm=False, **config)
    assert norm == pytest.approx(float(optax.tree.norm(jax.grad(loss_of)(params(), BATCH))))
    assert NORM in text
