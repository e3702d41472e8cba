"""The sum of parameters and update: found again as the optimizer's own copy; under offload it comes
after the step, and a step that needs it is refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.trace.dependence import with_updated_copies
from zerojax.xla import jaxprs

BATCH = np.ones((8, 4), np.float32)


class State(TrainState):
    """With an average of its parameters."""

    average: Any


def create() -> State:
    params = {"w": jnp.ones((4, 8)), "v": jnp.ones(8)}
    return State.create(apply_fn=None, params=params, tx=optax.adam(1e-2), average=params)


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"] + params["v"]) ** 2)


def mixed(old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)


def average_of_new(state: State, batch: Any) -> Any:
    new = state.apply_gradients(grads=zerojax.grad(loss)(state.params, batch))
    return new.replace(average=mixed(state.average, new.params)), {"loss": 0.0}


def norm_of_new(state: State, batch: Any) -> Any:
    new = state.apply_gradients(grads=zerojax.grad(loss)(state.params, batch))
    return new, {"loss": 0.0, "norm": optax.tree.norm(new.params)}


def loss_after(state: State, batch: Any) -> Any:
    value, grads = zerojax.value_and_grad(loss)(state.params, batch)
    new = state.apply_gradients(grads=grads)
    after = jax.jit(loss)(new.params, batch)
    return new, {"fell": value - after}


def projected(state: State, batch: Any) -> Any:
    new = state.apply_gradients(grads=zerojax.grad(loss)(state.params, batch))
    params = {**new.params, "v": jnp.maximum(new.params["v"], 0)}
    return new.replace(params=params), {}


def shifted(state: State, batch: Any) -> Any:
    """A sum as the update's, but of a number."""
    new = state.apply_gradients(grads=zerojax.grad(loss)(state.params, batch))
    return new.replace(params={**new.params, "v": new.params["v"] + 1.0}), {}


def averaged_old(state: State, batch: Any) -> Any:
    value, grads = zerojax.value_and_grad(loss)(state.params, batch)
    new = state.apply_gradients(grads=grads)
    told = {"loss": value, "norm": optax.tree.norm(state.params), "grads": optax.tree.norm(grads)}
    return new.replace(average=mixed(state.average, state.params)), told


def in_a_function(state: State, batch: Any) -> Any:
    """The sum is made within a jitted function."""
    grads = zerojax.grad(loss)(state.params, batch)
    return jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads), {}


def frozen_by_hand(state: State, batch: Any) -> Any:
    """One parameter is put back: it is not the sum that the update makes."""
    new = state.apply_gradients(grads=zerojax.grad(loss)(state.params, batch))
    return new.replace(params={**new.params, "v": state.params["v"]}), {}


def zero_with(section: Any = "cpu", **keywords: Any) -> zerojax.Zero:
    return zerojax.zero(stage=2, offload_optimizer=section, mesh=zerojax.mesh(2), **keywords)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("step", "named"),
    [
        (average_of_new, r"average_of_new computes state\['average'\]\['v'\]"),
        (norm_of_new, r"norm_of_new computes its result\['norm'\] from"),
        (loss_after, r"loss_after computes its result\['fell'\] from"),
        (projected, r"projected computes state\.params from"),
        (shifted, r"shifted computes state\.params from"),
        (frozen_by_hand, r"frozen_by_hand computes state\.params from"),
    ],
)
def test_refused_by_name(step: Callable[..., Any], named: str, accumulation: int) -> None:
    zero = zero_with(gradient_accumulation_steps=accumulation)
    state = zero.abstract_state(create)
    with pytest.raises(NotImplementedError, match=named) as told:
        zero(step).lower(state, BATCH)
    assert "from the state that the step returns" in str(told.value)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("step", [averaged_old, in_a_function])
def test_let_through(step: Callable[..., Any], accumulation: int) -> None:
    zero = zero_with(gradient_accumulation_steps=accumulation)
    zero(step).lower(zero.abstract_state(create), BATCH)


def test_refused_before_anything_is_done() -> None:
    zero = zero_with()
    state = zero.init(create)
    with pytest.raises(NotImplementedError, match="norm_of_new computes"):
        zero(norm_of_new)(state, BATCH)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


class Copy(NamedTuple):
    compute: Any


class Given(NamedTuple):
    params: Any
    opt_state: Copy


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (optax.apply_updates, True),
        (lambda p, u: (u + p.astype(u.dtype)).astype(p.dtype), True),
        (lambda p, u: p + u, False),  # in float32, which is not the copy's
        (lambda p, u: optax.apply_updates(p, 2 * u), False),
        (lambda p, u: jnp.maximum(optax.apply_updates(p, u), 0), False),
        (lambda p, u: p, False),
    ],
)
def test_the_updated_copy_is_one_variable(returned: Any, found: bool) -> None:
    def step(state: Given, update: jax.Array) -> Any:
        copy = optax.apply_updates(state.opt_state.compute, update)
        return Given(returned(state.params, update), Copy(copy)), ()

    low = jnp.ones(3, jnp.bfloat16)
    given = Given(low, Copy(low))
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(given, jnp.ones(3))
    own, copy = jaxprs.open_jaxpr(with_updated_copies(closed, given, shapes))[0].outvars
    assert (own is copy) == found
