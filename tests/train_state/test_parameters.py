"""The parameters of any pytree, by the optimizer's moments or by a function of the state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for

import zerojax
from zerojax.train_state.pytree import find_parameters, open_pytree

KEYS = "bf16 or fp16"
PARAMS = {"w": np.ones((4, 3)), "b": np.zeros(3)}


def state_of(tx: Any, **more: Any) -> dict[str, Any]:
    return {"params": PARAMS, "opt_state": zerojax.wrap(tx).init(PARAMS), **more}


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)),
        optax.lion(0.1),
    ],
    ids=["adam", "momentum", "chain", "lion"],
)
def test_have_the_form_of_the_moments(tx: Any) -> None:
    """Neither a counter nor another array of a parameter's shape is taken for them."""
    state = state_of(tx, step=np.zeros((), np.int32), bias=np.ones(3))
    opened = open_pytree((state,), find_parameters((state,), KEYS, None))
    assert opened.parts.params is not PARAMS
    assert jax.tree.map(lambda a, b: a is b, opened.parts.params, PARAMS) == {"w": True, "b": True}
    assert opened.parts.opt_state is state["opt_state"]
    assert [*map(np.shape, jax.tree.leaves(opened.parts.rest))] == [(3,), ()]
    (closed,) = opened.kind.close(opened.parts, None)
    assert all(map(lambda a, b: a is b, jax.tree.leaves(closed), jax.tree.leaves(state)))


def test_by_a_function() -> None:
    """The parameters of two networks, in a tree of the function's own."""
    tx = zerojax.wrap(optax.sgd(0.1))
    state = {"one": PARAMS, "two": PARAMS | {"w": np.ones((5, 3))}, "opt_state": tx.init({})}

    def both(state: Any) -> Any:
        return state["two"], state["one"]["w"]

    opened = open_pytree((state,), find_parameters((state,), KEYS, both))
    assert jax.tree.map(np.shape, opened.parts.params) == ({"w": (5, 3), "b": (3,)}, (4, 3))
    (closed,) = opened.kind.close(opened.parts, None)
    assert jax.tree.structure(closed) == jax.tree.structure(state)
    assert closed["two"]["w"] is state["two"]["w"]


@pytest.mark.parametrize(
    ("tx", "more", "words"),
    [
        (optax.sgd(0.1), {}, r"the form.* moments: none.*params=lambda state: state\[0\]"),
        (optax.adam(0.1), {"average": PARAMS}, r"moments: state\['average'\], state\['params'\]\."),
    ],
)
def test_cannot_be_known(tx: Any, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"bf16 or fp16: zerojax must know.*{words}"):
        find_parameters((state_of(tx, **more),), KEYS, None)


def test_one_optimizer() -> None:
    state = state_of(optax.adam(0.1))
    two = {"one": state, "two": state}
    with pytest.raises(ValueError, match=r"one state of an optimizer of .* and there are 2"):
        find_parameters((two,), KEYS, None)
    with pytest.raises(ValueError, match="and there are 0"):
        find_parameters((PARAMS,), KEYS, None)


@pytest.mark.parametrize(
    "select",
    [
        lambda state: jnp.ones(3),
        lambda state: state["opt_state"],
        lambda state: [state["params"], state["params"]["w"]],
    ],
    ids=["a constant", "the optimizer", "twice"],
)
def test_a_function_of_something_else(select: Any) -> None:
    with pytest.raises(ValueError, match=r"params= of zerojax\.zero returned .*not part of the"):
        find_parameters((state_of(optax.adam(0.1)),), KEYS, select)


def test_the_plan_knows_them() -> None:
    """Moments lie as their parameters."""
    zero = zero_for(3, axes=2, bf16=True)
    plan = zero.plan(state_of(optax.adam(0.1)))
    assert jax.tree.leaves(plan.params) == jax.tree.leaves(plan.opt_state.inner[0].mu)
    assert plan.opt_state.inner[0].count == plan.step
