"""States that start from the user's parameters: nothing is drawn for them, and all else is kept."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainer.jobs import POINTS

import zerojax
from zerojax.trainer import classification_loss
from zerojax.trainer.initial_state import InitialState
from zerojax.trainer.model import model_of

pytestmark = pytest.mark.usefixtures("quick_compile")
SAMPLE = {name: np.stack([row[name] for row in POINTS[:8]]) for name in ("x", "label")}
DRAWN: list[object] = []


def normal(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer that notes each run."""
    drawn = jax.random.normal(key, shape, dtype)
    return jax.pure_callback(lambda x: (DRAWN.append(shape), x)[1], drawn, drawn)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, kernel_init=normal)(x)


class Shifted(nn.Module):
    """Has a further collection, which is drawn as well."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shift = self.variable("shifts", "x", lambda: jax.random.normal(self.make_rng("params")))
        return nn.Dense(4, kernel_init=normal)(x + shift.value)


class Nnx(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(8, 4, kernel_init=normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.dropout(x))


def given(like: Any) -> Any:
    return jax.tree.map(lambda x: np.arange(x.size, dtype="f").reshape(x.shape), like)


def created(model: Any, tx: Any, params: Any = None, **config: Any) -> tuple[Any, Any, Any]:
    """A state, its parameters, and all else as arrays of the host."""
    wrapped = model_of(model, classification_loss, 42, False)
    zero = zerojax.zero(stage=3, **config)
    DRAWN.clear()
    state = InitialState(wrapped, zero, zero.wrap(tx), params).create(SAMPLE)
    jax.block_until_ready(jax.tree.leaves(state))
    found = wrapped.params(state)
    values = jax.tree.map(np.asarray, found)
    others = wrapped.with_params(state, jax.tree.map(jnp.zeros_like, found))
    leaves = jax.tree.leaves(nnx.state(others[0]) if isinstance(others, tuple) else others)
    return state, values, [jax.random.key_data(x) if _is_key(x) else np.asarray(x) for x in leaves]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("model", [Plain(), Shifted(), Nnx], ids=["plain", "shifted", "nnx"])
def test_nothing_is_drawn_and_all_else_is_kept(model: Any) -> None:
    _, drawn, want = created(model, optax.adam(0.1))
    assert len(DRAWN) > 0
    _, params, got = created(model, optax.adam(0.1), given)
    assert not DRAWN
    jax.tree.map(np.testing.assert_array_equal, params, given(drawn))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("config", [{}, {"offload_optimizer": "cpu"}], ids=["", "offload"])
def test_an_optimizer_that_starts_from_the_parameters_has_those_given(config: Any) -> None:
    tx = optax.contrib.schedule_free_sgd(0.1)
    state, params, _ = created(Plain(), tx, given, **config)
    (z,) = (x for x in jax.tree.leaves(state.opt_state) if x.shape == (8, 4))
    np.testing.assert_array_equal(z, params["Dense_0"]["kernel"])
    assert not DRAWN
