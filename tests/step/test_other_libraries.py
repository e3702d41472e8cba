"""Programs of Equinox, as its documentation writes them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, host, zero_for

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 8)).astype(np.float32), "y": RNG.integers(4, size=16)}
TX = optax.adam(1e-2)


def equinox_create(key: jax.Array, tx: Any = TX) -> Any:
    """The activation is a leaf of the model."""
    model = eqx.nn.MLP(8, 4, 16, 2, activation=jax.nn.tanh, key=key)
    return model, tx.init(eqx.filter(model, eqx.is_array))


def equinox_step(model: Any, opt_state: Any, batch: Any, tx: Any = TX) -> Any:
    @eqx.filter_value_and_grad
    def loss_fn(model: Any) -> jax.Array:
        logits = jax.vmap(model)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = loss_fn(model)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def trained(step: Any, state: Any) -> Any:
    """The state after three steps, with the last loss."""
    for _ in range(3):
        *state, loss = step(*state, BATCH)
    return *state, loss


PLAIN = eqx.filter_jit(equinox_step)
KEY = jax.random.key(0)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "k", "step"), [(3, 1, equinox_step), (1, 2, PLAIN)])
def test_equinox(stage: int, k: int, step: Any) -> None:
    zero = zero_for(stage, k)
    got = trained(zero(step), zero.init(equinox_create, KEY))
    assert isinstance(got[0], eqx.nn.MLP)
    pairs = (got, trained(PLAIN, equinox_create(KEY)))
    assert_near(*(host(eqx.filter(x, eqx.is_array)) for x in pairs), TOLERANCE["float32"])


class Wide(eqx.Module):  # type: ignore[misc]
    w: jax.Array
    width: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w + jnp.zeros(self.width)


def test_a_setting_that_is_no_static_field() -> None:
    model = Wide(jnp.ones((8, 4)), 4)
    with pytest.raises(TypeError) as caught:
        zero_for(3)(equinox_step)(model, TX.init(eqx.filter(model, eqx.is_inexact_array)), BATCH)
    [note] = [note for note in caught.value.__notes__ if "zerojax" in note]
    assert "['0 (model)'].width" in note
    assert "eqx.field(static=True)" in note


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"bf16": True}, {"offload_optimizer": "cpu"}])
def test_equinox_in_half_precision_and_offloaded(config: Any) -> None:
    """``eqx.apply_updates`` adds float32 updates to bfloat16 parameters in float32; the masters
    are those of Equinox in float32, but for the roundings of the gradients."""
    zero = zero_for(3, **config)
    tx = zero.wrap(TX)
    step = zero(lambda model, opt_state, batch: equinox_step(model, opt_state, batch, tx))
    got = trained(step, zero.init(lambda key: equinox_create(key, tx), KEY))
    want = trained(PLAIN, equinox_create(KEY))
    models = [host(eqx.filter(x[0], eqx.is_array)) for x in (got, want)]
    # Adam moves each by at most the rate, in the direction of a gradient's sign.
    assert_near(*models, 3e-2 if "bf16" in config else TOLERANCE["float32"])
    assert float(got[-1]) == pytest.approx(float(want[-1]), rel=1e-2)
    weight = models[0].layers[0].weight
    assert np.any(weight != weight.astype(jax.numpy.bfloat16))
