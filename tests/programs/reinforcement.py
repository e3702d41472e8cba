"""Policy gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState

from programs.program import ROW, ROWS, SGD, WIDTH, Program, creator, refused


class Policy(nn.Module):
    """Logits of four actions, and the value of a state."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(4)(x), nn.Dense(1)(x)[..., 0]


def experience(rng: np.random.Generator) -> tuple[Any, ...]:
    return (
        {
            "seen": rng.normal(size=(ROWS, WIDTH)),
            "action": rng.integers(4, size=ROWS, dtype=np.int32),
            "advantage": rng.normal(size=ROWS) + np.arange(ROWS) / 8,
            "return": rng.normal(size=ROWS),
            "old": np.log(rng.uniform(0.1, 0.9, size=ROWS)),
        },
    )


def clipped_loss(state: TrainState, params: Any, batch: Any, advantage: Any) -> jax.Array:
    """PPO's loss with values and entropy."""
    logits, value = state.apply_fn({"params": params}, batch["seen"])
    logs = nn.log_softmax(logits)
    log = jnp.take_along_axis(logs, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(log - batch["old"])
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    entropy = -jnp.sum(jnp.exp(logs) * logs, -1)
    return -gain.mean() + 0.5 * jnp.mean((value - batch["return"]) ** 2) - 0.01 * entropy.mean()


def policy_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    loss, grads = jax.value_and_grad(lambda p: clipped_loss(state, p, batch, batch["advantage"]))(
        state.params
    )
    return state.apply_gradients(grads=grads), {"loss": loss}


def normalized(advantage: jax.Array) -> jax.Array:
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def normalized_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Statistics of the batch alone, which each row's loss needs."""
    advantage = normalized(batch["advantage"])
    loss, grads = jax.value_and_grad(lambda p: clipped_loss(state, p, batch, advantage))(
        state.params
    )
    return state.apply_gradients(grads=grads), {"loss": loss}


def own_values_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Advantages from the network's own values, normalized."""
    _, value = state.apply_fn({"params": state.params}, batch["seen"])
    advantage = normalized(batch["return"] - value)
    loss, grads = jax.value_and_grad(lambda p: clipped_loss(state, p, batch, advantage))(
        state.params
    )
    return state.apply_gradients(grads=grads), {"loss": loss}


def unrolled_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Two updates from one batch."""
    for _ in range(2):
        state, metrics = policy_step(state, batch)
    return state, metrics


create = creator(Policy(), ROW, SGD)
MANY = refused("gradient_accumulation_steps to 1")
INTERACT = refused("cannot be accumulated over 4 micro-batches")

PROGRAMS = (
    Program("advantage_normalized", create, normalized_step, experience),
    Program("advantage_own", create, own_values_step, experience, accumulated=INTERACT),
    Program("policy_unrolled", create, unrolled_step, experience, accumulated=MANY),
)  # fmt: skip
