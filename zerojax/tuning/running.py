"""Measured time of a workload's step, on devices that exist."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.api import Zero
from zerojax.tuning.workload import Workload
from zerojax.xla.types import PyTree

STEPS = 5


def seconds_of_a_step(zero: Zero, workload: Workload, steps: int = STEPS) -> float:
    """Returns the median time of a step, in seconds, on a batch of zeros.

    Args:
      zero: The decorator.
      workload: The workload; its step is compiled and run on a new state, which is discarded.
      steps: The number of steps to time, after one warm-up step.
    """
    state = zero.init(workload.create_state, jax.random.key(0))
    step, batch, args = zero(workload.train_step), *map(_zeros, (workload.batch, workload.args))
    times = []
    for _ in range(1 + steps):
        start = time.perf_counter()
        if isinstance(state, tuple):  # NNX: updated in place
            out = step(*state, batch, *args)
        else:
            state, out = step(state, batch, *args)
        arrays = [nnx.state(x) for x in state] if isinstance(state, tuple) else state
        jax.block_until_ready((arrays, out))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _zeros(tree: PyTree) -> PyTree:
    """Replaces abstract arrays by zeros, and abstract PRNG keys by keys."""

    def array(x: object) -> object:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(array, tree)
