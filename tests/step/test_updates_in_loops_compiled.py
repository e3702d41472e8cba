"""K updates in a loop, compiled for 8 absent H100s: K times the traffic of a step with one, and its
memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from equal import zero_for
from jax import lax

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

UPDATES, WIDTH, LAYERS, ROWS = 4, 1024, 4, 4096
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def create() -> Any:
    params = {f"w{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(LAYERS)}
    return params, TX.init(params)


def updated(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        x = batch["x"]
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return jnp.mean((x.mean(1) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def until(params: Any, opt_state: Any, batch: Any) -> Any:
    start = 0, params, opt_state, jnp.zeros(())

    def body(carry: Any) -> Any:
        return carry[0] + 1, *updated(*carry[1:3], batch)

    return lax.while_loop(lambda carry: carry[0] < UPDATES, body, start)[1:]


class Cost(NamedTuple):
    """Bytes that a device sends, and those that it holds beside the state and the batch."""

    sent: int
    held: int


def cost(step: Callable[..., Any]) -> Cost:
    zero = zero_for(3, mesh=zerojax.topology("h100", 8))
    batch = {"x": (ROWS, WIDTH), "y": (ROWS,)}
    given = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in batch.items()}
    compiled = zero(step).lower(*zero.abstract_state(create), given).compile()
    sent = sum(each.moved_bytes for each in collectives(compiled.as_text()))
    return Cost(sent, compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
def test_updates_cost_what_steps_cost() -> None:
    one, several = cost(updated), cost(until)
    batch = ROWS * WIDTH * 4
    assert UPDATES * one.sent <= several.sent + batch
    assert several.sent <= 1.1 * UPDATES * one.sent
    assert several.held <= 1.1 * one.held
