"""Programs of Equinox, as its documentation writes them."""

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


@pytest.mark.parametrize("config", [{"bf16": True}, {"offload_optimizer": "cpu"}])
def test_equinox_in_half_precision_and_offloaded(config: Any) -> None:
    """``eqx.apply_updates`` adds float32 updates to bfloat16 parameters in float32; the masters
    are those of Equinox in float32, but for the roundings of the gradients."""
    zero = zero_for(3, **config)
    tx = zero.wrap(TX)

    def create(key: jax.Array) -> Any:
        model, _ = equinox_create(key)
        return model, tx.init(eqx.filter(model, eqx.is_array))

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(
            lambda model: cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])
        )(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    decorated, plain = zero(step), eqx.filter_jit(equinox_step)
    got, want = zero.init(create, jax.random.key(0)), equinox_create(jax.random.key(0))
    for _ in range(3):
        *got, loss = decorated(*got, BATCH)
        *want, expected = plain(*want, BATCH)
    models = [host(eqx.filter(model, eqx.is_array)) for model in (got[0], want[0])]
    # Adam moves each by at most the rate, in the direction of a gradient's sign.
    assert_near(*models, 3e-2 if "bf16" in config else TOLERANCE["float32"])
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
    weight = models[0].layers[0].weight
    assert np.any(weight != weight.astype(jax.numpy.bfloat16))
