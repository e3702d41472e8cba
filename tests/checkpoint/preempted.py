"""A program that is told to stop, again and again.

Each time it leaves ``ready.TURN.PROCESS`` once it trains (or evaluates), and
``stopped.TURN.PROCESS`` with the number of the loop at which it saw the notice, and the steps done.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from groups import wait_for
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.checkpoint import PREEMPTED, Checkpointer, Preemption

EVALUATES = 2  # the turn
TURNS = 4


def create() -> TrainState:
    return TrainState.create(apply_fn=None, params={"w": jnp.zeros((8, 8))}, tx=optax.sgd(1.0))


def train(process: int, folder: Path) -> None:
    """Every step adds 1 to every parameter. Saves at each notice, and leaves after the last."""
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)

    @zero
    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = zerojax.value_and_grad(lambda p: -(batch @ p["w"]).sum(1).mean())(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    @zero.evaluate
    def evaluate(state: TrainState, batch: jax.Array) -> jax.Array:
        return (batch @ state.params["w"]).mean()

    rows = NamedSharding(zero.mesh, PartitionSpec("data"))
    batch = jax.make_array_from_process_local_data(rows, np.ones((1, 8), np.float32))
    state, done = zero.init(create), 0
    with Checkpointer(folder / "checkpoints", zero) as checkpointer:
        for turn in range(TURNS):
            with Preemption() as preemption:
                for number in range(1_000_000):
                    if turn == EVALUATES:
                        evaluate(state, batch)
                    else:
                        state, _ = step(state, batch)
                        done += 1
                    if number == 3:
                        (folder / f"ready.{turn}.{process}").touch()
                    if preemption.notice:
                        break
            (folder / f"stopped.{turn}.{process}").write_text(f"{number} {done}")
            wait_for((folder / f"sent.{turn}").exists, str)  # the last signals may come now
            if turn != EVALUATES:
                checkpointer.save(done, state)
    sys.exit(PREEMPTED)
