"""The main job's model, state and training step.

Example::

    zero = zerojax.zero("configs/zero3.json")
    work = workload(job, zero, rows=16)
    state = zero.init(work.create_state, key)
    state, metrics = zero(work.train_step)(state, batch, dropout_key)   # {"loss": float32 []}
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zerojax
from examples.run_clm.job import Job
from zerojax.models.gpt import GPT
from zerojax.models.tensor_parallel import TensorParallel


def workload(job: Job, zero: zerojax.Zero, rows: int) -> zerojax.Workload:
    """State and training step, of `{"tokens": int32 [rows, block_size + 1]}` and a dropout key.

    The loss is the mean cross-entropy, in nats a byte.
    """
    model = _model(job, zero)

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, job.block_size), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=zero.optimizer())

    def train_step(state: TrainState, batch: Any, dropout_key: jax.Array) -> Any:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(params: Any) -> jax.Array:
            variables, rngs = {"params": params}, {"dropout": dropout_key}
            options: Any = {"deterministic": False, "targets": targets, "rngs": rngs}
            return state.apply_fn(variables, inputs, **options).mean()

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return zerojax.Workload(
        create_state,
        train_step,
        {"tokens": jax.ShapeDtypeStruct((rows, job.block_size + 1), jnp.int32)},
        tokens=rows * job.block_size,
        args=(jax.eval_shape(lambda: jax.random.key(0)),),
        specs=specs_on(zero.mesh),
    )


def specs_on(mesh: Mesh) -> Callable[[Any], Any] | None:
    """The parameters' specs on a mesh whose axis "model" cuts the model; None on others."""
    tensor = TensorParallel.of(mesh)
    return tensor.specs if tensor else None


def eval_step_of(job: Job, zero: zerojax.Zero) -> Callable[[TrainState, Any], jax.Array]:
    """The mean cross-entropy of a state on such a batch, without dropout."""
    model = _model(job, zero)

    def eval_step(state: TrainState, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        losses: Any = model.apply({"params": state.params}, inputs, targets=targets)
        return losses.mean()

    return eval_step


def _model(job: Job, zero: zerojax.Zero) -> GPT:
    return GPT(job.model_config, job.fused(zero.per_device), tensor=TensorParallel.of(zero.mesh))
