"""A small training program whose state lies on a disk."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

BATCH = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def create(scale: float = 1.0) -> TrainState:
    params = {"w": jnp.ones((16, 40)) / 4 * scale, "v": jnp.full((40, 8), 0.1)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def train_step(state: TrainState, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]))

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def zero_for(nvme_path: Any, **keywords: Any) -> zerojax.Zero:
    """Of two devices; cuts the parameters into three and two pieces."""
    return zerojax.zero(
        stage=3,
        stage3_param_persistence_threshold=0,
        mesh=zerojax.mesh(2),
        sub_group_size=220,
        offload_optimizer={"device": "nvme", "nvme_path": str(nvme_path), "buffer_count": 2},
        **keywords,
    )
