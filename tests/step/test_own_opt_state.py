"""``state.opt_state`` is optax's own, in the step and outside, read and written."""

from collections.abc import Callable
from typing import Any

import emitted
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_near, host, zero_for
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

TX = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
X = np.random.default_rng(0).normal(size=(16, 8))


class Average(TrainState):
    """With a field of its own, and one behind it that has a default."""

    average: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.9)


def create(tx: Any = TX) -> Average:
    params = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)}
    return Average.create(apply_fn=None, params=params, tx=tx, average=params)


def gradients(state: TrainState, batch: Any) -> Any:
    return jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] - 1) ** 2))(state.params)


def updated(state: TrainState, batch: Any) -> Any:
    loss, grads = gradients(state, batch)
    return state.apply_gradients(grads=grads), loss


def sets_the_rate(state: TrainState, batch: Any) -> Any:
    """By the number of updates, as a schedule of one's own."""
    state.opt_state.hyperparams["learning_rate"] = 0.5 / (1 + state.opt_state.count)
    return updated(state, batch)


def replaces_the_rate(state: TrainState, batch: Any) -> Any:
    """After the update, for the next one."""
    state, loss = updated(state, batch)
    new = optax.tree.set(state.opt_state, learning_rate=jnp.minimum(0.1, loss))
    return state.replace(opt_state=new), loss


def by_hand(state: TrainState, batch: Any) -> Any:
    """``tx.update`` in place of ``apply_gradients``; the moments are of the results."""
    loss, grads = gradients(state, batch)
    updates, opt_state = state.tx.update(grads, state.opt_state, params=state.params)
    params = optax.apply_updates(state.params, updates)
    moments = opt_state.inner_state[0].mu
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    return new, {"loss": loss, "moments": jax.tree.map(jnp.sum, moments)}


def starts_again(state: TrainState, batch: Any) -> Any:
    return updated(state.replace(opt_state=state.tx.init(state.params)), batch)


def keeps_the_better(state: TrainState, batch: Any) -> Any:
    """The new state or the old one, array by array."""
    new, loss = updated(state, batch)
    better = gradients(new, batch)[0] < 0.9 * loss
    return jax.tree.map(lambda x, y: jnp.where(better, x, y), new, state), loss


def in_a_branch(state: TrainState, batch: Any) -> Any:
    return jax.lax.cond(state.step % 2 == 0, updated, lambda s, b: (s, 0.0 * s.step), state, batch)


def in_a_loop(state: TrainState, batch: Any) -> Any:
    return jax.lax.scan(updated, state, jnp.stack([batch, 2 * batch]))


def closed_over(state: TrainState, batch: Any) -> Any:
    """An optimizer that is not the state's."""
    loss, grads = gradients(state, batch)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


STEPS = [
    sets_the_rate, by_hand, starts_again, keeps_the_better, in_a_branch, in_a_loop, closed_over,
]  # fmt: skip
REFUSED = [keeps_the_better, in_a_branch, in_a_loop]
"""With two micro-batches."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("stage", "k"), [(3, 1), (3, 2), (1, 1)])
def test_exactly(step: Callable[..., Any], stage: int, k: int) -> None:
    source = emitted.Source(create, step, (X.astype(np.float32),), rows=len(X))
    if k == 2 and step in REFUSED:
        with pytest.raises(ValueError, match=r"cannot be accumulated|does not support"):
            emitted.check(source, stage, k)
        return
    emitted.check(source, stage, k)


@pytest.mark.parametrize("step", [replaces_the_rate, by_hand])
def test_compiled(step: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        zero = zero_for(3)
        got, want = zero.init(create), create()
        ours, plain = zero(step), jax.jit(step)
        for _ in range(3):
            (got, out), (want, expected) = ours(got, X), plain(want, X)
            assert jax.tree.structure(got.opt_state) == jax.tree.structure(want.opt_state)
            assert isinstance(got, Average)
            pairs = [(x.params, x.opt_state, x.step, x.average) for x in (got, want)]
            assert_near(*(host(x) for x in zip(pairs, (out, expected), strict=True)), 1e-9)


@pytest.mark.parametrize("step", [by_hand, keeps_the_better, in_a_loop])
def test_masters_follow(step: Callable[..., Any]) -> None:
    """With bf16 the step's state holds the parameters in bfloat16; their masters come along."""
    zero = zero_for(3, bf16=True)
    state, want = zero.init(create), create()
    for _ in range(3):
        (state, _), (want, _) = zero(step)(state, X), jax.jit(step)(want, X)
    assert state.params["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.params["w"], want.params["w"], atol=0.05)
    assert np.any(state.params["w"] != state.params["w"].astype(jnp.bfloat16))


def test_written_between_two_steps() -> None:
    zero = zero_for(3)
    state, want = zero.init(create), create()
    step, plain = zero(updated), jax.jit(updated)
    for rate in (0.1, 0.01):
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        want.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        (state, _), (want, _) = step(state, X), plain(want, X)
    np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-4)
    assert float(zerojax.telemetry(state)["learning_rate"]) == np.float32(0.01)


@pytest.mark.parametrize("key", ["bf16", "gradient_clipping"])
def test_an_optimizer_of_its_own_has_no_features(key: str) -> None:
    zero = zero_for(3, **{key: 1.0 if key == "gradient_clipping" else True})
    with pytest.raises(ValueError, match=rf"does not apply .*{key}.* Call state\.tx\.update"):
        zero(closed_over)(zero.init(create), X)


@pytest.mark.parametrize("step", [sets_the_rate, starts_again])
def test_under_offload_the_state_is_written_between_steps(step: Callable[..., Any]) -> None:
    zero = zero_for(2, offload_optimizer={"device": "cpu"})
    with pytest.raises((NotImplementedError, TypeError), match="between two steps"):
        zero(step)(zero.init(create), X)


def test_in_nnx() -> None:
    def make() -> Any:
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model: nnx.Linear, optimizer: nnx.Optimizer, batch: Any) -> Any:
        rate = optimizer.opt_state.hyperparams["learning_rate"]
        rate[...] = 0.5 / (1 + optimizer.opt_state.count[...])
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    batch = (X.astype(np.float32),)
    emitted.check(emitted.Source(make, step, batch, emitted.in_arguments, rows=len(X)))
