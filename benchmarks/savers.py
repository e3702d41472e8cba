"""A training state of a given size, and its savers: zerojax and plain orbax."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer

MATRICES = 16


def create_state_of(gigabytes: float) -> Callable[[], TrainState]:
    """``create_state()`` of matrices and vectors under AdamW, noise in all of them.

    The bytes are those of fp32 parameters with their two moments; a matrix is four times as wide
    as it is high.
    """
    height = max(16, round(math.sqrt(gigabytes * 1e9 / 12 / MATRICES / 4) / 16) * 16)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(MATRICES):
        shapes |= {f"matrix{i:02}": (height, 4 * height), f"vector{i:02}": (4 * height,)}

    def create_state() -> TrainState:
        params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
        leaves, structure = jax.tree.flatten((state.params, state.opt_state))
        drawn = [_noise(i, x.shape) if x.ndim else x for i, x in enumerate(leaves)]
        params, opt_state = jax.tree.unflatten(structure, drawn)
        return state.replace(params=params, opt_state=opt_state)

    return create_state


def _noise(leaf: int, shape: tuple[int, ...]) -> jax.Array:
    """Numbers in [-1, 1) that compress no better than random ones, and compile in no time."""
    x = jnp.uint32(leaf * 0x9E3779B9 % 2**32)
    for d in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, d)
        x = x + index * jnp.uint32(math.prod(shape[d + 1 :]))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x ^ (x >> 16)).astype(jnp.float32) / 2.0**31 - 1


def bytes_of(state: Any) -> int:
    """All arrays together, each counted once."""
    return sum(x.nbytes for x in jax.tree.leaves(state))


class Saver(Protocol):
    """Saves states in a folder, in the background, and restores the newest."""

    def save(self, step: int, state: Any) -> None: ...

    def wait(self) -> None: ...

    def restore(self, abstract_state: Any) -> Any: ...

    def close(self) -> None: ...


class WithOrbax:
    """As its documentation shows it, with its defaults."""

    def __init__(self, folder: Path, zero: zerojax.Zero) -> None:
        self._manager = ocp.CheckpointManager(folder)

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, abstract_state: Any) -> Any:
        step = self._manager.latest_step()
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract_state))

    def close(self) -> None:
        self._manager.close()


SAVERS: dict[str, Callable[[Path, zerojax.Zero], Saver]] = {
    "zerojax": Checkpointer,  # checks every array that it restores
    "orbax": WithOrbax,
}
