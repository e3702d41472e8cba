"""Leftovers of ``pmap``, with any form of the state: errors that say what to write."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import jax_utils
from train_state.test_pytree import (
    BATCH,
    TX,
    WIDTH,
    as_arguments,
    as_dict,
    loss_of,
    params_and_opt_state,
    train_state,
)

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


def in_train_state(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize("form", ["TrainState", "pair", "parameters", "dict", "state_argnums"])
def test_a_copy_for_each_device(form: str) -> None:
    params, opt_state = params_and_opt_state()
    copies: Any = jax_utils.replicate((params, opt_state))
    step, state = {
        "TrainState": (in_train_state, (jax_utils.replicate(train_state(0)),)),
        "pair": (as_arguments, copies),
        "parameters": (as_arguments, (copies[0], opt_state)),
        "dict": (as_dict, ({"params": copies[0], "opt": copies[1], "step": 0},)),
        "state_argnums": (as_arguments, copies),
    }[form]
    options = {"state_argnums": (0, 1)} if form == "state_argnums" else {}
    with pytest.raises(ValueError, match=r"entry for each of 8 devices.*unreplicate\(state\)"):
        zerojax.zero(stage=3)(step, **options)(*state, BATCH)


def test_a_batch_with_a_part_for_each_device() -> None:
    parts = jax.tree.map(lambda x: x.reshape(8, -1, WIDTH), BATCH)
    copies = jax_utils.replicate(params_and_opt_state())
    with pytest.raises(ValueError, match=r"the batch as \[rows, \.\.\.\]"):
        zerojax.zero(stage=3)(as_arguments)(*copies, parts)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
        return nn.Dense(WIDTH)(x)


def normed(params: Any, stats: Any, opt_state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        y, new = Normed().apply(variables, batch["x"], True, mutable=["batch_stats"])
        return jnp.mean((y - batch["y"]) ** 2), new["batch_stats"]

    grads, stats = jax.grad(loss_fn, has_aux=True)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), stats, opt_state


def averaged(params: Any, opt_state: Any, batch: Any) -> Any:
    grads = jax.lax.pmean(jax.grad(loss_of)(params, batch), "batch")
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.parametrize("step", [normed, averaged])
def test_a_mean_over_the_devices(step: Any) -> None:
    state = params_and_opt_state()
    if step is normed:
        variables = Normed().init(jax.random.key(0), BATCH["x"], False)
        params = variables["params"]
        state = params, variables["batch_stats"], TX.init(params)
    with pytest.raises(NameError, match=r"axis of a pmap.*axis_name of a layer.*remove it"):
        zerojax.zero(stage=3)(step)(*state, BATCH)
