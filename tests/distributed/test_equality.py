"""What differs between two processes is refused in both, before a step has run with it."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.distributed.equality import where_they_differ
from zerojax.distributed.launched import LaunchError
from zerojax.distributed.lockstep import TICK

BATCH = {"x": np.ones((4, 8), np.float32)}


class State(TrainState):
    dropout: Any


def made(key: Any, rate: float = 1e-2) -> State:
    params = {"w": jax.random.normal(key, (8, 4))}
    tx = optax.adam(rate)
    return State.create(apply_fn=None, params=params, tx=tx, dropout=jax.random.key(1))


def train_step(state: TrainState, batch: Any, scale: Any = 1.0, key: Any = None) -> Any:
    def loss(params: Any) -> Any:
        x = batch["x"] * batch.get("weight", 1.0)
        return ((x @ params["w"]) ** 2).mean() * scale

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def refusals(process: int) -> dict[str, str]:
    said = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            said[name] = ""
        except LaunchError as error:
            said[name] = str(error)

    zero, key = zerojax.zero(stage=1), jax.random.key(0)
    drawn = np.random.default_rng(process).normal(size=(8, 4)).astype(np.float32)

    def drawn_state() -> TrainState:
        return TrainState.create(apply_fn=None, params={"w": drawn}, tx=optax.sgd(0.1))

    def run(state: Any = None, *more: Any, **of_batch: Any) -> None:
        zero(train_step)(made(key) if state is None else state, {**BATCH, **of_batch}, *more)

    other = zerojax.zero(stage=1, gradient_clipping=1.0 + process)
    attempt("seed of zero.init", lambda: zero.init(made, jax.random.key(process)))
    attempt("numpy in zero.init", lambda: zero.init(drawn_state))
    attempt("plain state", lambda: run(made(jax.random.key(process))))
    attempt("learning rate", lambda: run(zero.init(lambda: made(key, 1e-2 * (1 + process)))))
    attempt("number", lambda: run(None, 1.0 + process))
    attempt("argument", lambda: run(None, np.array(1.0 + process)))
    attempt("key", lambda: run(None, 1.0, jax.random.key(process)))
    attempt("number of the batch", lambda: run(weight=np.array(1.0 + process)))
    attempt("config of a plain state", lambda: other(train_step)(made(key), BATCH))
    nan = made(key).replace(params={"w": jnp.full((8, 4), jnp.nan)})  # not equal to itself
    attempt("nothing", lambda: run(nan))
    time.sleep(2.5 * TICK)  # the lockstep ends no process for values that were refused
    return said


def test_what_differs_between_processes_is_refused(
    in_processes: Callable[..., list[Any]], quick_processes: None
) -> None:
    one, other = in_processes(2, refusals)
    assert one == other
    assert {name: part for name, part in SAID.items() if part not in one[name]} == {}
    assert one["nothing"] == ""


SAID = {
    "seed of zero.init": "argument [0] differs between the processes:\n"
    "  process 0: [0, 0]\n  process 1: [0, 1]\n",
    "numpy in zero.init": "zero.init is another program in each process: line ",
    "plain state": "the state: .params['w'] differs between the processes:\n"
    "  process 0: float32[8, 4] of checksum ",
    "learning rate": "dense<-0.00999999977> : tensor<f32>\n  process 1: ",
    "number": "argument [0] behind the batch differs between the processes:\n"
    "  process 0: 1.0\n  process 1: 2.0\n",
    "argument": "argument [0] behind the batch differs between the processes:\n"
    "  process 0: 1.0\n  process 1: 2.0\n",
    "key": "train_step: argument [1] behind the batch differs",
    "number of the batch": "train_step: batch['weight'] differs",
    "config of a plain state": "gradient_clipping of the config differs",
}


def test_lines_are_cut_to_where_they_differ() -> None:
    long = [f"{'x' * 5000}{i}{'y' * 5000}" for i in range(2)]
    one, other = where_they_differ(long)
    assert len(one) == len(other) == 203
    assert (one[:4], one[53], other[53]) == ("...x", "0", "1")
    assert where_they_differ(["a", "b"]) == ["a", "b"]
