"""A copy of a state in device memory, for computations outside a step."""

from __future__ import annotations

import jax

from zerojax.offload.disk.array import DiskArray
from zerojax.plan.places import DEVICE, PINNED
from zerojax.plan.stored import StoredArray
from zerojax.xla.types import PyTree


def on_device(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree in device memory, with unchanged sharding.

    Arrays in host memory are copied, arrays on disk are read, arrays on the device are returned
    unchanged. Each device must have room for its shards. A step and ``zero.evaluate`` take an
    offloaded state directly and need no such copy.

    Args:
      tree: Arrays of a state, such as ``state.params`` or ``nnx.state(model)``.

    Raises:
      DiskStateError: a file on the disk is damaged or lost; restore the last checkpoint.
      ValueError: the state was passed to a later step.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax
      >>> from flax.training.train_state import TrainState
      >>> zero = zerojax.zero(stage=1, offload_optimizer="cpu")
      >>> params = {"w": jnp.ones((8, 4))}
      >>> state = zero.init(lambda: TrainState.create(
      ...     apply_fn=None, params=params, tx=optax.adam(1e-3)))
      >>> state.params["w"].sharding.memory_kind
      'pinned_host'
      >>> zerojax.on_device(state.params)["w"].sharding.memory_kind
      'device'
    """
    return jax.tree.map(_fetched, tree)


def _fetched(x: object) -> object:
    if isinstance(x, StoredArray):
        return StoredArray(_fetched(x.stored), x.shape)
    if isinstance(x, DiskArray):
        return x.load()
    if isinstance(x, jax.Array) and x.sharding.memory_kind == PINNED:
        return jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
    return x
