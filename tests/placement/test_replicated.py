"""Leftovers of ``pmap``, with any form of the state: errors that say what to write."""

from typing import Any

import jax
import pytest
from flax import jax_utils
from train_state.test_pytree import (
    BATCH,
    WIDTH,
    as_arguments,
    loss_of,
    params_and_opt_state,
    train_state,
)

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


def in_train_state(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize("form", ["TrainState", "pair"])
def test_a_copy_for_each_device(form: str) -> None:
    copies: Any = jax_utils.replicate(params_and_opt_state())
    step, state = {
        "TrainState": (in_train_state, (jax_utils.replicate(train_state(0)),)),
        "pair": (as_arguments, copies),
    }[form]
    with pytest.raises(ValueError, match=r"entry for each of 8 devices.*unreplicate\(state\)"):
        zerojax.zero(stage=3)(step)(*state, BATCH)


def test_a_batch_with_a_part_for_each_device() -> None:
    parts = jax.tree.map(lambda x: x.reshape(8, -1, WIDTH), BATCH)
    copies = jax_utils.replicate(params_and_opt_state())
    with pytest.raises(ValueError, match=r"the batch as \[rows, \.\.\.\]"):
        zerojax.zero(stage=3)(as_arguments)(*copies, parts)
