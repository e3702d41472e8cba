"""What works in the optimizer, on a state that is any pytree: the numbers of a ``TrainState``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import host, zero_for
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

TX = optax.adam(0.05)
X = np.random.default_rng(0).normal(size=(16, 24)).astype("f4")
STEPS = 3
Create = Callable[[], Any]


class Learner(NamedTuple):
    params: Any
    opt_state: Any
    average: Any
    updates: Any


def params() -> Any:
    w = jnp.sin(jnp.arange(24 * 16, dtype=jnp.float32)).reshape(24, 16)
    return {"w": w, "b": jnp.zeros(16)}


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.square((x @ params["w"] + params["b"] - 1).astype(jnp.float32)))


def of_a_train_state(zero: zerojax.Zero) -> tuple[Any, list[Any]]:
    """The parameters and the losses of a few steps."""

    @zero
    def step(state: TrainState, x: Any) -> Any:
        loss, grads = zerojax.value_and_grad(loss_of)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=params(), tx=zero.wrap(TX))

    state, losses = zero.init(create), []
    for _ in range(STEPS):
        state, loss = step(state, X)
        losses.append(loss)
    return host((state.params, state.opt_state)), host(losses)


def pair(zero: zerojax.Zero, tx: Any) -> tuple[Create, Any]:
    """``(params, opt_state, batch) -> (params, opt_state, loss)``."""

    @zero
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = zerojax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return lambda: (params(), tx.init(params())), step


def learner(zero: zerojax.Zero, tx: Any) -> tuple[Create, Any]:
    """A NamedTuple with an average of the parameters and a counter."""

    @zero
    def step(state: Learner, x: Any) -> Any:
        loss, grads = zerojax.value_and_grad(loss_of)(state.params, x)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates)
        average = optax.incremental_update(state.params, state.average, 0.5)
        return Learner(new, opt_state, average, state.updates + 1), loss

    count = jnp.zeros((), jnp.int32)
    return lambda: Learner(params(), tx.init(params()), params(), count), step


def trained(form: Any, zero: zerojax.Zero, steps: int = STEPS, state: Any = None) -> Any:
    """The state after a few steps, and their losses."""
    create, step = form(zero, zero.wrap(TX))
    state, losses = zero.init(create) if state is None else state, []
    for _ in range(steps):
        if form is pair:
            *state, loss = step(*state, X)
        else:
            state, loss = step(state, X)
        losses.append(loss)
    return state, host(losses)


CONFIGS: dict[str, Any] = {
    "bf16, accumulation": {"stage": 2, "k": 2, "bf16": True},
    "fp16": {"stage": 2, "fp16": True},
    "optimizer on the host": {"stage": 1, "k": 2, "offload_optimizer": "cpu"},
    "all on the host": {
        "stage": 3,
        "bf16": True,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
    "quantized": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    "secondary partition": {"stage": 3, "zero_hpz_partition_size": 2},
}


@pytest.mark.parametrize(
    ("form", "config"),
    [(learner if i % 2 else pair, config) for i, config in enumerate(CONFIGS.values())],
    ids=CONFIGS,
)
def test_the_same_numbers(form: Any, config: Any) -> None:
    of_params = (lambda state: state.params) if form is learner else None
    state, losses = trained(form, zero_for(**config, params=of_params))
    (want_params, want_opt_state), want_losses = of_a_train_state(zero_for(**config))
    jax.tree.map(np.testing.assert_array_equal, losses, want_losses)
    jax.tree.map(np.testing.assert_array_equal, host(state[0]), want_params)
    jax.tree.map(np.testing.assert_array_equal, host(state[1].inner), want_opt_state)
    figures = zerojax.telemetry(state)
    assert figures["step"] == STEPS
    assert figures["grad_norm"] > 0


def test_evaluates_in_the_compute_dtype() -> None:
    zero = zero_for(3, bf16=True)
    create, _ = pair(zero, zero.wrap(TX))

    @zero.evaluate
    def product(state: Any, x: Any) -> Any:
        return x @ state[0]["w"]

    got = product(zero.init(create), X.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16


def test_two_optimizers_of_one_state_are_refused() -> None:
    zero = zero_for(2, bf16=True)
    one, other = zero.wrap(TX), zero.wrap(optax.adam(0.1))

    @zero
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        for tx in (one, other):
            grads = zerojax.grad(loss_of)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state

    with pytest.raises(ValueError, match=r"one optimizer state with two .* applies bf16 or fp16"):
        step(*zero.init(lambda: (params(), one.init(params()))), X)


def test_an_update_by_hand_is_refused() -> None:
    zero = zero_for(2, bf16=True)

    @zero
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = zerojax.grad(loss_of)(params, x)
        return optax.tree.add_scale(params, -0.1, grads), opt_state

    with pytest.raises(ValueError, match=r"step never updates its optimizer state.*tx\.update"):
        step(*zero.init(lambda: (params(), zero.wrap(TX).init(params()))), X)
