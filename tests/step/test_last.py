"""States and arguments that are changed between two steps: the next step goes on from what they are
then, as where the function is called plainly."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

X = np.random.default_rng(0).normal(size=(8, 4)).astype("f4")


class Net(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, use_running_average=False, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(self.norm(self.linear(x)))
        more = self.more[...] if hasattr(self, "more") else 0
        return x + more


def create() -> tuple[Any, ...]:
    model = Net()
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Average("loss")


def step(model: Any, optimizer: Any, metrics: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def evaluates(model: Any, optimizer: Any, metrics: Any) -> None:
    model.eval()


def sets_a_variable(model: Any, optimizer: Any, metrics: Any) -> None:
    model.linear.kernel = nnx.Param(jnp.ones((4, 4)))


def adds_a_variable(model: Any, optimizer: Any, metrics: Any) -> None:
    model.more = nnx.BatchStat(jnp.ones(4))


CHANGES = [evaluates, sets_a_variable, adds_a_variable]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps(change: Callable[..., None]) -> None:
    zero = zerojax.zero(stage=2)
    mine, plain = zero.init(create), create()
    decorated = zero(step)
    for _ in range(2):
        for _ in range(3):
            np.testing.assert_allclose(decorated(*mine, X), step(*plain, X), rtol=1e-5)
        change(*mine)
        change(*plain)
    for _ in range(2):
        np.testing.assert_allclose(decorated(*mine, X), step(*plain, X), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(nnx.state((mine[0], mine[2]))),
                    jax.tree.leaves(nnx.state((plain[0], plain[2]))), strict=True):  # fmt: skip
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def train_state() -> TrainState:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1))


def train_step(state: TrainState, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((x @ params["w"] - 1) ** 2))(
        state.params
    )
    return state.apply_gradients(grads=grads), loss


def test_a_returned_state_is_not_kept_alive() -> None:
    decorated = zerojax.zero(stage=1)(train_step)
    state, _ = decorated(train_state(), X)
    state, _ = decorated(state, X)
    params, w = state.params, weakref.ref(state.params["w"])
    del state
    params["w"] = None
    gc.collect()
    assert w() is None


@pytest.mark.slow
def test_other_arguments_after_calls_of_one_kind() -> None:
    zero = zerojax.zero(stage=1)
    decorated, state, plain = zero(train_step), zero.init(train_state), train_state()
    placed = jax.device_put(X, NamedSharding(zero.mesh, PartitionSpec("data")))
    for batch in (placed, placed, X, np.concatenate([X, X]), placed, jnp.asarray(X)):
        state, loss = decorated(state, batch)
        plain, expected = train_step(plain, np.asarray(batch))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="divisible"):
        decorated(state, X[:3])
    with pytest.raises(TypeError, match="numbers"):
        decorated(state, X.astype(object))
    state.params["w"] = jnp.zeros(4)  # the same state, with another array
    plain = plain.replace(params={"w": jnp.zeros(4)})
    for _ in range(2):
        state, loss = decorated(state, placed)
        plain, expected = train_step(plain, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    with pytest.raises(TypeError, match=r"inside jax\.jit"):
        jax.jit(lambda x: decorated(state, x))(X)
