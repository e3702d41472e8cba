"""A folder of the main job with the checkpoints of a tiny model."""

import dataclasses
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax
from examples.run_clm.run_folder import History, RunFolder
from zerojax.models.gpt import GPT, SIZES, GPTConfig


class Saved(NamedTuple):
    """A run's folder, and the model and state of its newest checkpoint."""

    folder: pathlib.Path
    model: GPT
    state: TrainState


def save(folder: pathlib.Path, *, text: str = "9 bytes, sha256 0", **sizes: int) -> Saved:
    """Writes two checkpoints of a tiny GPT, some of whose sizes may differ."""
    config = GPTConfig(**SIZES["tiny"] | sizes, scan=True, remat=True, dropout=0.1)
    model, zero = GPT(config), zerojax.zero(stage=2, mesh=zerojax.mesh(4))

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.ones((1, 8), jnp.int32))["params"]
        params = jax.tree.map(lambda x: 5 * x, params)  # so that bytes differ
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    about = dataclasses.asdict(config)
    with RunFolder(folder, zero, {"text": text}, about) as run:
        for step in (1, 2):
            state = zero.init(create_state, jax.random.key(step))
            assert run.save(step, state, History(), jax.random.key(0)) == ""
    return Saved(folder, model, state)
