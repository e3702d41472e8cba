"""A flax model trained with ZeRO stage 3: which of 32 numbers is the largest?

Command: `JAX_PLATFORMS=cpu python examples/minimal.py` (10 s on 2 cores). From 3.5 (ln 32) to

    step 100  loss 0.70
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

zerojax.init_distributed()  # one of several processes, where it was launched as such
if not jax.distributed.is_initialized():
    jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator

zero = zerojax.zero(stage=3, bf16=True, stage3_param_persistence_threshold=0)  # small arrays too


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


state = zero.init(create_state, jax.random.key(0))  # sharded from the start
say = print if jax.process_index() == 0 else lambda *_: None  # once for all processes
say(repr(zero.plan(state)))  # each device holds an eighth of every array
rng = np.random.default_rng(0)
for step in range(1, 101):
    x = rng.normal(size=(256, 32)).astype(np.float32)[zerojax.process_rows(256)]
    state, loss = train_step(state, {"x": x, "y": x.argmax(axis=-1)})
    if step % 10 == 0:
        say(f"step {step:3}  loss {loss:.2f}")
