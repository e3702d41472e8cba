"""Updates in a loop of the step: the numbers of plain jit, and the traffic of single steps."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from equal import TOLERANCE, assert_near, zero_for
from flax.training.train_state import TrainState
from jax import lax
from train_state.test_pytree import (
    BATCH,
    TX,
    arrays,
    loss_of,
    network,
    params_and_opt_state,
    train_state,
    updated,
)

from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile")

UPDATES = 4


def epochs(params: Any, opt_state: Any, batch: Any) -> Any:
    """The same batch several times."""

    def body(state: Any, _: None) -> Any:
        *state, loss = updated(*state, batch)
        return tuple(state), loss

    state, losses = lax.scan(body, (params, opt_state), None, length=UPDATES)
    return *state, losses


def shuffled(params: Any, opt_state: Any, batch: Any) -> Any:
    """Minibatches of a rollout, as PPO has them, epoch after epoch."""

    def epoch(carry: Any, _: None) -> Any:
        state, key = carry
        key, drawn = jax.random.split(key)
        order = jax.random.permutation(drawn, len(batch["x"]))
        parts = jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), batch)

        def update(state: Any, part: Any) -> Any:
            *state, loss = updated(*state, part)
            return tuple(state), loss

        state, losses = lax.scan(update, state, parts)
        return (state, key), losses

    start = (params, opt_state), jax.random.key(0)
    (state, _), losses = lax.scan(epoch, start, None, length=2)
    return *state, losses


def fori(params: Any, opt_state: Any, batch: Any) -> Any:
    def body(_: Any, state: Any) -> Any:
        return updated(*state[:2], batch)

    return lax.fori_loop(0, UPDATES, body, (params, opt_state, jnp.zeros(())))


def until(params: Any, opt_state: Any, batch: Any) -> Any:
    """A loop whose number of updates is not known."""

    def body(carry: Any) -> Any:
        n, *state, _ = carry
        return n + 1, *updated(*state, batch)

    carry = 0, params, opt_state, jnp.inf
    _, *state = lax.while_loop(lambda carry: carry[0] < UPDATES, body, carry)
    return state


def delayed(params: Any, opt_state: Any, batch: Any) -> Any:
    """A target network that follows the updates, and is read by them."""

    def body(carry: Any, _: None) -> Any:
        params, target, opt_state = carry
        pulled = jax.tree.map(lambda p, t: p + 0.1 * t, params, target)
        loss, grads = jax.value_and_grad(loss_of)(pulled, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, optax.incremental_update(params, target, 0.5), opt_state), loss

    (params, _, opt_state), losses = lax.scan(
        body, (params, params, opt_state), None, length=UPDATES
    )
    return params, opt_state, losses


LOOPS: list[Callable[..., Any]] = [epochs, shuffled, fori, until, delayed]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_numbers_of_plain_jit(
    loop: Callable[..., Any], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "SMALL", 0)
    with jax.enable_x64(True):
        batch = jax.tree.map(jnp.asarray, BATCH)
        got, want = (
            arrays(run(loop)(*params_and_opt_state(), batch)) for run in (zero_for(stage), jax.jit)
        )
    assert_near(got, want, TOLERANCE["float64"])


def in_train_state(state: TrainState, batch: Any) -> Any:
    def body(state: TrainState, _: None) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return lax.scan(body, state, None, length=UPDATES)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["arguments", "TrainState"])
def test_an_update_moves_what_a_step_moves(
    form: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop carries gathered parameters."""
    monkeypatch.setattr(rule, "SMALL", 0)
    zero = zero_for(stage)

    def once(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def moved(step: Callable[..., Any], *state: Any) -> Counter[str]:
        found = Counter[str]()
        for row in zero(step).collectives(*state, BATCH).rows:
            if row.kind != "all-reduce":
                found[row.kind] += row.times * row.bytes
        return found

    if form == "arguments":
        state = zero.abstract_state(params_and_opt_state)
        loop, single = moved(epochs, *state), moved(updated, *state)
    else:
        made = zero.abstract_state(lambda: train_state(0))
        loop, single = moved(in_train_state, made), moved(once, made)
    assert loop == {kind: UPDATES * n for kind, n in single.items()}
    assert single["reduce-scatter"] > 0
    assert network(0)
