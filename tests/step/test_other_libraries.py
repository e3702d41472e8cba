"""Programs of Haiku and Equinox, as their documentation writes them."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, host, zero_for

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 8)).astype(np.float32), "y": RNG.integers(4, size=16)}
TX = optax.adam(1e-2)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def equinox_create(key: jax.Array) -> Any:
    """The activation is a leaf of the model."""
    model = eqx.nn.MLP(8, 4, 16, 2, activation=jax.nn.tanh, key=key)
    return model, TX.init(eqx.filter(model, eqx.is_array))


def equinox_step(model: Any, opt_state: Any, batch: Any) -> Any:
    @eqx.filter_value_and_grad
    def loss_fn(model: Any) -> jax.Array:
        return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])

    loss, grads = loss_fn(model)
    updates, opt_state = TX.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


@pytest.mark.parametrize(("stage", "k", "jitted"), [(3, 1, False), (1, 2, True)])
def test_equinox(stage: int, k: int, jitted: bool) -> None:
    zero, plain = zero_for(stage, k), eqx.filter_jit(equinox_step)
    step = zero(plain if jitted else equinox_step)
    got, want = zero.init(equinox_create, jax.random.key(0)), equinox_create(jax.random.key(0))
    for _ in range(3):
        *got, loss = step(*got, BATCH)
        *want, expected = plain(*want, BATCH)
    assert isinstance(got[0], eqx.nn.MLP)
    pairs = [eqx.filter((*x, y), eqx.is_array) for x, y in ((got, loss), (want, expected))]
    assert_near(*map(host, pairs), TOLERANCE["float32"])
