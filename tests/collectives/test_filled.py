"""A stack that stays gathered is gathered by the first loop over it: the numbers of plain jit."""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emitted import check_step
from flax.training.train_state import TrainState
from jax import lax
from swept import swept

import zerojax
from zerojax.collectives import Inserter, Shard, kept
from zerojax.collectives.ahead import LEAST

pytestmark = pytest.mark.usefixtures("quick_compile")

N, ROWS = 128, 16  # a stack of smaller layers is gathered with all that is small
X = np.random.default_rng(1).normal(size=(ROWS, N))
Loss = Callable[[Any, Any], Any]


def layers(x: Any, ws: Any, remat: bool = True, **keywords: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    block = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return lax.scan(lambda x, w: (block(x, w), None), x, ws, **keywords)[0]


def loss_of(run: Callable[[Any, Any], Any]) -> Loss:
    return lambda params, x: jnp.mean(run(x, params["w"]) ** 2)


def with_ends(x: Any, ws: Any) -> Any:
    """The loop, and its last layer used again unsharded."""
    return layers(x, ws) @ ws[-1]


FILLED = {
    "once": loss_of(layers),
    "in reverse": loss_of(lambda x, ws: layers(x, ws, reverse=True)),
    "without remat": loss_of(lambda x, ws: layers(x, ws, remat=False)),
    "in a call": loss_of(lambda x, ws: jax.jit(layers)(x, ws)),
    "twice": loss_of(lambda x, ws: layers(layers(x, ws), ws)),
    "decayed": lambda params, x: loss_of(layers)(params, x) + 0.1 * jnp.sum(params["w"] ** 2),
}
NOT_FILLED = {
    "used besides": loss_of(with_ends),
    "transposed before": loss_of(lambda x, ws: layers(x, ws.transpose(0, 2, 1))),
}
LOSSES: dict[str, Loss] = {**FILLED, **NOT_FILLED}
WAYS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "live": {"stage": 3, "stage3_max_live_parameters": 10**9},
}


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    return step


def start(length: int = LEAST) -> TrainState:
    w = np.random.default_rng(0).normal(size=(length, N, N)) / 4
    return TrainState.create(apply_fn=None, params={"w": jnp.asarray(w)}, tx=optax.adam(1e-2))


def zero_of(way: str) -> zerojax.Zero:
    return zerojax.zero(mesh=zerojax.mesh(), stage3_param_persistence_threshold=0, **WAYS[way])


def fills(loss: Loss, length: int = LEAST, gathered: bool = True) -> bool:
    """Whether the stack of parameters is left to the loops."""
    w = start(length).params["w"]
    closed = jax.make_jaxpr(jax.value_and_grad(loss))({"w": w}, X)
    given = [Shard(w, (None, "data", None)), X]
    inserter = Inserter(zerojax.mesh(), "data", keep=gathered)
    (how, _) = kept.decide(closed, given, kept.by_plan(given, inserter), inserter, fill=True)
    return how is not None and how.by_loop


@pytest.mark.parametrize(
    ("name", "way"),
    swept(
        product(LOSSES, WAYS),
        lambda name, way: (name, way) in [("twice", "stage 2"), ("in reverse", "live")],
    ),
)
def test_the_numbers_of_plain_jit(name: str, way: str) -> None:
    check_step(zero_of(way), step_of(LOSSES[name]), start, X)


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_loop_fills(name: str) -> None:
    assert fills(LOSSES[name]) == (name in FILLED)


def test_not_in_short_loops_nor_where_parameters_are_dropped() -> None:
    assert not fills(FILLED["once"], LEAST - 1)
    assert not fills(FILLED["once"], gathered=False)
