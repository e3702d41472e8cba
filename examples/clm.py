"""The main job's training step, and what its config leaves to be chosen for it.

config = resolved(job, mesh, console)
zero = zerojax.zero(config, mesh=mesh)
made = workload(job, zero, rows)
train_step = zero(made.train_step)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from rich.console import Console

import zerojax
from examples.job import Job
from zerojax.config import ZeroConfig, load
from zerojax.config.json_file import read_file
from zerojax.foresight.choice import BATCH
from zerojax.models.gpt import GPT
from zerojax.tuning.fit import undecided


def model(job: Job, zero: zerojax.Zero) -> GPT:
    """The job's GPT, with the fused layers that it asks for."""
    return GPT(job.model_config, job.fused(zero.per_device))


def workload(job: Job, zero: zerojax.Zero, rows: int) -> zerojax.Workload:
    """State and step: the mean loss of `{"tokens": int32 [rows, block_size + 1]}`, and a dropout
    key behind it."""
    made = model(job, zero)

    def create_state(key: jax.Array) -> TrainState:
        params = made.init(key, jnp.zeros((1, job.block_size), jnp.int32))["params"]
        return TrainState.create(apply_fn=made.apply, params=params, tx=zero.optimizer())

    def train_step(state: TrainState, batch: Any, dropout_key: jax.Array) -> Any:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss(params: Any) -> jax.Array:
            variables, rngs = {"params": params}, {"dropout": dropout_key}
            how: Any = {"deterministic": False, "targets": targets, "rngs": rngs}
            return state.apply_fn(variables, inputs, **how).mean()

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return zerojax.Workload(
        create_state,
        train_step,
        {"tokens": jax.ShapeDtypeStruct((rows, job.block_size + 1), jnp.int32)},
        tokens=rows * job.block_size,
        args=(jax.eval_shape(lambda: jax.random.key(0)),),
    )


def resolved(job: Job, mesh: Mesh, console: Console) -> ZeroConfig:
    """The job's config. A stage or an offload that is "auto" there is chosen for these devices,
    with the micro-batch; the rows of an update stay, and with them the numbers."""
    raw = read_file(job.config)
    if not isinstance(raw, dict) or not undecided(raw):
        return load(job.config)
    given = {key: value for key, value in raw.items() if key in BATCH and value != "auto"}
    fitted = zerojax.fit(
        job.config,
        functools.partial(workload, job),
        train_batch_size=job.rows(load(given), mesh.size),
        seq=job.block_size,
        mesh=mesh,
    )
    console.print(f'For "auto" in {job.config}, the fastest that fits: {fitted.choice}')
    return load(fitted.config)
