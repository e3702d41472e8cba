"""Programs that come to stand still."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.distributed.watchdog import paused, watchdog

# s of the watchdog; on a busy machine a process may give no sign of life for 5 s.
LIMIT, LIMIT_ALONE = 20.0, 8.0
LONG, LONG_ALONE = 1.3 * LIMIT, 1.3 * LIMIT_ALONE


def create() -> TrainState:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(1e-3))


def loader_without_data() -> None:
    time.sleep(3600)


def train(process: int, folder: Path, loader: bool = False) -> None:
    """Steps without end. Process 1 takes long to compile, or with ``loader`` has no data for a
    step."""
    zero = zerojax.zero(stage=3)

    @zero
    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        if process == 1 and not loader:
            time.sleep(LONG)
        loss, grads = zerojax.value_and_grad(lambda p: (batch @ p["w"]).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    rows = NamedSharding(zero.mesh, PartitionSpec("data"))
    batch = jax.make_array_from_process_local_data(rows, np.ones((1, 8), np.float32))
    state = zero.init(create)
    for number in range(1_000_000):
        state, _ = step(state, batch)
        if number == 3:
            (folder / f"up.{process}").touch()
            if process == 1 and loader:
                loader_without_data()


def alone(process: int, folder: Path) -> None:
    """All that takes long without being a stall, and a stall."""
    there = watchdog()
    assert there is not None
    assert watchdog() is there
    there.begin()
    there.ran(jnp.ones(()))
    sys.settrace(lambda *_: lambda *_: None)  # as a debugger does
    stopped_at_a_breakpoint()
    sys.settrace(None)
    (folder / "debugged").touch()
    with paused("an export"):
        time.sleep(LONG_ALONE)
    (folder / "paused").touch()
    jax.jit(lambda x: time.sleep(LONG_ALONE) or x)(1)
    (folder / "compiled").touch()
    there.ran({"loss": jnp.ones(()), "logits": jnp.ones(5)})
    loader_without_data()


def stopped_at_a_breakpoint() -> None:
    time.sleep(LONG_ALONE)
