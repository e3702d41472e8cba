"""A training run that goes on where it was killed, with the numbers of one that was not.

Command: `python examples/resume.py` (10 s on 2 CPU cores). Stop it with Ctrl-C or `kill -9` at any
step and run it again; to begin again, remove `runs/resume`. It ends with

    step 100  loss 0.597

whether or not it was stopped, and wherever it goes on: at another stage or on another number of
devices the numbers agree to rounding.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer

zerojax.init_distributed()  # one of several processes, where it was launched as such
if not jax.distributed.is_initialized():
    jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator

zero = zerojax.zero(stage=3, bf16=True)  # or the path of a DeepSpeed JSON


class MLP(nn.Module):
    """Numbers [rows, 32] to logits [rows, 32]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(32)(x)


def create_state(key: jax.Array) -> TrainState:
    model = MLP()
    params = model.init(key, jnp.zeros((1, 32)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@zero
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch_at(step: int) -> dict[str, np.ndarray]:
    """The process's own of 256 rows, a function of the step alone: after a restart no batch comes
    twice or is missed."""
    x = np.random.default_rng(step).normal(size=(256, 32)).astype(np.float32)
    x = x[zerojax.process_rows(256)]
    return {"x": x, "y": x.argmax(axis=-1)}


folder = sys.argv[1] if len(sys.argv) > 1 else "runs/resume"
key = jax.random.key(0)
say = print if jax.process_index() == 0 else lambda *_: None  # once for all processes
with Checkpointer(folder, zero, keep=2) as checkpointer:
    done = checkpointer.latest_step() or 0
    if done:
        say(f"goes on after step {done}")
        state = checkpointer.restore(zero.abstract_state(create_state, key))
    else:
        state = zero.init(create_state, key)
    for step in range(done + 1, 101):
        state, loss = train_step(state, batch_at(step))
        if step % 10 == 0:
            say(f"step {step:3}  loss {loss:.3f}")
        if step % 20 == 0:
            checkpointer.save(step, state)  # written while training goes on
