"""Updates in a loop of the step: the numbers of plain jit, and the traffic of single steps."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
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
    output,
    params_and_opt_state,
    train_state,
    updated,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

UPDATES = 4


def epochs(params: Any, opt_state: Any, batch: Any) -> Any:
    """The same batch several times."""

    def body(state: Any, _: None) -> Any:
        *state, loss = updated(*state, batch)
        return tuple(state), loss

    state, losses = lax.scan(body, (params, opt_state), None, length=UPDATES)
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


def while_small(params: Any, opt_state: Any, batch: Any) -> Any:
    """The condition reads the parameters that the loop updates, and the loss."""

    def small(carry: Any) -> Any:
        params, _, loss = carry
        return (optax.tree.norm(params) < 1e3) & (loss > 1.0)

    start = params, opt_state, jnp.inf
    return lax.while_loop(small, lambda carry: updated(*carry[:2], batch), start)


def chosen(params: Any, opt_state: Any, batch: Any) -> Any:
    """Every other iteration updates, every third in another way, within a while loop."""

    def rest(params: Any, opt_state: Any) -> Any:
        return params, opt_state, jnp.zeros(())

    def twice(params: Any, opt_state: Any) -> Any:
        params, opt_state, _ = updated(params, opt_state, batch)
        return updated(params, opt_state, batch)

    def body(carry: Any) -> Any:
        i, params, opt_state, _ = carry
        params, opt_state, loss = lax.cond(
            i % 2 == 0, lambda *state: updated(*state, batch), rest, params, opt_state
        )
        branches = [rest, twice, rest]
        params, opt_state, more = lax.switch(i % 3, branches, params, opt_state)
        return i + 1, params, opt_state, loss + more

    carry = 0, params, opt_state, jnp.zeros(())
    return lax.while_loop(lambda carry: carry[0] < UPDATES, body, carry)[1:]


def ppo(params: Any, opt_state: Any, batch: Any) -> Any:
    """Advantages before the epochs, minibatches by index within them."""
    values = output(params, batch["x"]).mean(1)
    errors = batch["y"].mean(1) - values
    _, gains = lax.scan(lambda last, x: (0.9 * last + x,) * 2, jnp.zeros_like(errors[0]), errors)
    data = {**batch, "y": batch["y"] * gains[:, None]}

    def update(state: Any, rows: Any) -> Any:
        *state, loss = updated(*state, jax.tree.map(lambda x: x[rows], data))
        return tuple(state), loss

    def epoch(state: Any, key: Any) -> Any:
        order = jax.random.permutation(key, len(batch["x"]))
        return lax.scan(update, state, order.reshape(2, -1))

    keys = jax.random.split(jax.random.key(0), 2)
    state, losses = lax.scan(epoch, (params, opt_state), keys)
    return *state, losses


LOOPS: list[Callable[..., Any]] = [
    *(epochs, fori, until, while_small, chosen, ppo),
]


SINGLE = jax.tree.map(lambda x: x.astype(np.float32), BATCH)


def exactly(create: Callable[[], Any], step: Callable[..., Any], stage: int, **how: Any) -> None:
    source = emitted.Source(create, step, (SINGLE,), **{"call": emitted.in_arguments} | how)
    emitted.check(source, stage, small_array_size=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_exactly(loop: Callable[..., Any], stage: int) -> None:
    exactly(params_and_opt_state, loop, stage)


@pytest.mark.parametrize("loop", [chosen, until], ids=lambda loop: loop.__name__)
def test_compiled(loop: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        batch = jax.tree.map(jnp.asarray, BATCH)
        got, want = (
            arrays(run(loop)(*params_and_opt_state(), batch))
            for run in (zero_for(3, small_array_size=0), jax.jit)
        )
    assert_near(got, want, TOLERANCE["float64"])


def over_seeds() -> Any:
    """Parameters [seeds, ...]."""
    return jax.vmap(lambda seed: jax.tree.map(lambda x: x + seed / 9, network(0)))(jnp.arange(3.0))


@pytest.mark.parametrize("loop", [updated, epochs, until], ids=lambda loop: loop.__name__)
def test_over_seeds(loop: Callable[..., Any]) -> None:
    """One state for each of several seeds, with the same batch."""

    def create() -> Any:
        params = over_seeds()
        return params, jax.vmap(TX.init)(params)

    exactly(create, jax.vmap(loop, in_axes=(0, 0, None)), 3)


def test_train_states_over_seeds() -> None:
    """One ``TrainState`` with a leading dimension of seeds, its counter too."""

    def several() -> TrainState:
        return jax.vmap(lambda params: train_state(0).replace(params=params))(over_seeds())

    step = jax.vmap(in_train_state, in_axes=(0, None))
    # Its counters have a dimension of seeds, so that it is a state like any pytree.
    exactly(several, step, 3, call=lambda step, state, arguments: step(state, *arguments))


def in_train_state(state: TrainState, batch: Any) -> Any:
    def body(state: TrainState, _: None) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return lax.scan(body, state, None, length=UPDATES)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("form", ["arguments", "TrainState"])
def test_an_update_moves_what_a_step_moves(form: str, stage: int) -> None:
    """No loop carries gathered parameters."""
    zero = zero_for(stage, small_array_size=0)

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
