"""Processor time of a call of a decorated step against plain ``jax.jit`` of the same step.

    python -m benchmarks.calls                       # some minutes on two cores
    python -m benchmarks.calls --record benchmarks/records

The arrays are tiny and XLA optimizes little, so that the host's work shows: the thread that calls
is measured until the call returns, and the fastest of many calls counts. The ways take turns in
one process on one device, with the state donated. The plain way of NNX objects is ``nnx.split``
before the loop, and ``jax.jit`` of a function that merges and splits. The CPU backend may run a
tiny program in the calling thread, and the decorated one also computes the gradients' norm.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from benchmarks.frame import Answer, Table, argument, question, say

LEAVES = (50, 500, 3000)
WARM_UP = 6
PLAIN, DECORATED = "plain", "decorated"
TX = optax.adam(1e-3)

Call = Callable[[Any], Any]
"""Runs a step on a state and returns the next state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The fastest call of a plain and of a decorated step.

    Attributes:
      form: The form of the state.
      leaves: Number of arrays of the state.
      plain, decorated: Processor seconds of the calling thread.
    """

    form: str
    leaves: int
    plain: float
    decorated: float

    @property
    def ratio(self) -> float:
        return self.decorated / self.plain


def take_turns(ways: Mapping[str, tuple[Call, Any]], calls: int) -> dict[str, float]:
    """Runs steps with their states turn by turn; returns the seconds of each one's fastest call."""
    states = {name: state for name, (_, state) in ways.items()}
    fastest = dict.fromkeys(ways, float("inf"))
    for turn in range(WARM_UP + calls):
        for name, (call, _) in ways.items():
            began = time.thread_time()
            states[name] = call(states[name])
            spent = time.thread_time() - began
            jax.block_until_ready(jax.tree.leaves(states[name]))
            if turn >= WARM_UP:
                fastest[name] = min(fastest[name], spent)
    return fastest


def train_state(leaves: int, zero: zerojax.Zero) -> dict[str, tuple[Call, Any]]:
    """A flax ``TrainState``."""

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=_arrays((leaves - 2) // 3), tx=TX)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        return state.apply_gradients(grads=state.params), batch.sum()

    def call(step: Any) -> Call:
        batch = _batch()
        return lambda state: step(state, batch)[0]

    return {
        PLAIN: (call(jax.jit(step, donate_argnums=0)), jax.jit(create)()),
        DECORATED: (call(zero(step)), zero.init(create)),
    }


def pytrees(leaves: int, zero: zerojax.Zero) -> dict[str, tuple[Call, Any]]:
    """Parameters and the optimizer's state as two arguments."""

    def create() -> tuple[Any, Any]:
        params = _arrays((leaves - 1) // 3)
        return params, TX.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        updates, opt_state = TX.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, batch.sum()

    def call(step: Any) -> Call:
        batch = _batch()
        return lambda state: step(*state, batch)[:2]

    return {
        PLAIN: (call(jax.jit(step, donate_argnums=(0, 1))), jax.jit(create)()),
        DECORATED: (call(zero(step)), zero.init(create)),
    }


def nnx_objects(leaves: int, zero: zerojax.Zero) -> dict[str, tuple[Call, Any]]:
    """An NNX model, with two arrays in each module, and its optimizer."""

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.scale, self.bias = nnx.Param(jnp.ones(4)), nnx.Param(jnp.ones(4))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer() for _ in range((leaves - 2) // 6)])

    def create() -> tuple[Model, Any]:
        model = Model()
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model: Model, optimizer: Any, batch: Any) -> Any:
        optimizer.update(model, nnx.state(model, nnx.Param))
        return batch.sum()

    graph, state = nnx.split(create())
    batch = _batch()

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(state: Any, batch: Any) -> tuple[Any, Any]:
        objects = nnx.merge(graph, state)
        loss = step(*objects, batch)
        return nnx.state(objects), loss

    decorated = zero(step)

    def call(objects: tuple[Model, Any]) -> tuple[Model, Any]:
        decorated(*objects, batch)
        return objects

    return {
        PLAIN: (lambda state: plain(state, batch)[0], state),
        DECORATED: (call, zero.init(create)),
    }


FORMS: dict[str, Callable[[int, zerojax.Zero], dict[str, tuple[Call, Any]]]] = {
    "TrainState": train_state,
    "(params, opt_state)": pytrees,
    "NNX objects": nnx_objects,
}


def measure(form: str, leaves: int, calls: int) -> Cost:
    """Compares the calls of a form of state."""
    say(f"calling a step of {leaves} leaves, {form}")
    zero = zerojax.zero(stage=0, mesh=zerojax.mesh(1), gradient_clipping=0.0)
    ways = FORMS[form](leaves, zero)
    fastest = take_turns(ways, calls)
    return Cost(form=form, leaves=leaves, plain=fastest[PLAIN], decorated=fastest[DECORATED])


def rows(costs: list[Cost]) -> list[list[str]]:
    """Headings, and a row for each comparison."""
    return [
        ["state", "leaves", "plain ms", "decorated ms", "decorated / plain"],
        *(
            [
                each.form,
                f"{each.leaves:,}",
                f"{each.plain * 1e3:.3f}",
                f"{each.decorated * 1e3:.3f}",
                f"{each.ratio:.2f}",
            ]
            for each in costs
        ),
    ]


def _arrays(count: int) -> dict[str, jax.Array]:
    return {f"p{i:04}": jnp.full((4,), float(i)) for i in range(count)}


def _batch() -> jax.Array:
    return jax.device_put(np.ones(4, "f4"))


@question(
    "calls",
    "Processor time of a call",
    argument("--calls", type=int, default=100, help="of each step"),
)
def main(options: argparse.Namespace) -> Answer:
    jax.config.update("jax_disable_most_optimizations", True)
    costs = [measure(form, leaves, options.calls) for leaves in LEAVES for form in FORMS]
    note = "Thread time of the fastest call, on one device, at stage 0."
    return Answer({"costs": costs}, [note, Table(rows(costs))])


if __name__ == "__main__":
    main()
