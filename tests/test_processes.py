"""A step of two processes computes what a step of one computes, on the same number of devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax

ROWS, STEPS = 32, 3


def create_state(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (16, 8))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jax.numpy.square(batch @ params["w"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def losses(process: int = 0, own_rows: bool = False, groups: bool = False) -> list[float]:
    """Of three steps at stage 3, each in two micro-batches.

    Every process passes the whole batch as a numpy array, or, with ``own_rows``, a global array
    made of the rows of each. With ``groups`` each process is a replica group.
    """
    mesh = zerojax.mesh(replicas=jax.process_count() if groups else None)
    zero = zerojax.zero(
        stage=3, gradient_accumulation_steps=2, stage3_param_persistence_threshold=0, mesh=mesh
    )
    step, state = zero(train_step), zero.init(create_state, jax.random.key(0))
    sharding = NamedSharding(zero.mesh, PartitionSpec(mesh.axis_names))
    each = ROWS // jax.process_count()
    found = []
    for seed in range(STEPS):
        batch: Any = np.random.default_rng(seed).normal(size=(ROWS, 16)).astype(np.float32)
        if own_rows:
            own = batch[process * each :][:each]
            batch = jax.make_array_from_process_local_data(sharding, own)
        state, loss = step(state, batch)
        found.append(float(loss))
    return found


def each_way(process: int) -> list[list[float]]:
    return [
        losses(process),
        losses(process, own_rows=True),
        losses(process, own_rows=True, groups=True),
    ]


def test_two_processes_compute_what_one_computes(
    in_two_processes: Callable[..., list[Any]],
) -> None:
    alone = losses()
    for found in in_two_processes(each_way):
        for way in found:
            assert way == pytest.approx(alone, rel=1e-6)
