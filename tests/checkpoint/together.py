"""What each of two processes does that restore and save together, with four devices each."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.plan.stored import unwrap_stored

BYTES = 10**9  # at most
SHAPE = (2048, 5120)
MATRICES = BYTES // (12 * SHAPE[0] * SHAPE[1])


def number(leaf: int, row: Any, column: Any) -> Any:
    """What stands at a place of a matrix: of JAX's arrays and numpy's, exact in float32."""
    return (row * 8191 + column * 127 + leaf * 31) & 0xFFFF


def create_large(key: jax.Array, matrices: int = MATRICES) -> TrainState:
    """Matrices under AdamW, all of them, moments too, filled by :func:`number`."""
    params = {f"w{i}": jnp.zeros(SHAPE) for i in range(matrices)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    leaves, structure = jax.tree.flatten((state.params, state.opt_state))
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, SHAPE, d) for d in (0, 1))
    made = [number(i, rows, columns).astype(x.dtype) if x.ndim else x for i, x in enumerate(leaves)]
    params, opt_state = jax.tree.unflatten(structure, made)
    return state.replace(params=params, opt_state=opt_state)


def assert_large(state: TrainState) -> None:
    """Every number of this process's shards is what and where it was."""
    for i, x in enumerate(jax.tree.leaves((state.params, state.opt_state))):
        for shard in x.addressable_shards if x.ndim else ():
            index = (slice(*s.indices(n)[:2]) for s, n in zip(shard.index, SHAPE, strict=True))
            places = (x.astype(np.int32) for x in np.ogrid[tuple(index)])
            assert np.array_equal(shard.data, number(i, *places)), (i, shard.index)


class Held(NamedTuple):
    """Bytes: of the complete state, on each device, and by how much this process grew at most."""

    complete: int
    devices: list[int]
    growth: int


def held(state: TrainState, growth: int) -> Held:
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    devices = dict.fromkeys(jax.local_devices(), 0)
    for x in arrays:
        for shard in x.addressable_shards:
            devices[shard.device] += shard.data.nbytes
    return Held(sum(x.nbytes for x in arrays), [*devices.values()], growth)


def resident(what: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{what}:")[2].split()[0])


def restore_and_save(process: int, source: Path, target: Path) -> Held:
    """Restores the large state at stage 3, and saves it again."""
    zero = zerojax.zero(stage=3)
    abstract = zero.abstract_state(create_large, jax.random.key(0))
    before = resident("VmRSS")
    with Checkpointer(source, zero, read_only=True) as checkpointer:
        state = checkpointer.restore(abstract)
    with Checkpointer(target, zero) as checkpointer:
        checkpointer.save(1, state)
    growth = resident("VmHWM") - before
    assert_large(state)
    return held(state, growth)


def _save_padded(folder: Path) -> None:
    """Saves a state over four devices of one process and three of the other."""
    from checkpoint.states import KEY, create_uneven, filled, zero_of

    zero = zero_of(3, 7)
    abstract = zero.abstract_state(create_uneven, KEY)
    state = filled(abstract)
    with Checkpointer(folder, zero) as checkpointer:
        checkpointer.save(1, state)
        got = checkpointer.restore(abstract)
    for x, y in zip(
        jax.tree.leaves(unwrap_stored(got)), jax.tree.leaves(unwrap_stored(state)), strict=True
    ):
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)


def take_every_turn(process: int, folder: Path) -> None:
    """All that a checkpointer does, in both processes at once."""
    from checkpoint.states import KEY, create_linen, zero_of  # starts the devices

    _save_padded(folder / "padded")

    zero = zero_of(3, 8, "fp16")
    state = zero.init(create_linen, KEY)
    with Checkpointer(folder, zero, keep=3) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state, extra={"step": step})
        checkpointer.wait()
        assert checkpointer.all_steps() == [2, 3, 4]
        time.sleep(0.3 * process)  # the first process deletes while the second one looks
        checkpointer.delete(4)
        assert checkpointer.all_steps() == [2, 3]
        assert checkpointer.extra() == {"step": 3}
        got = checkpointer.restore(zero.abstract_state(create_linen, KEY))
        for x, y in zip(jax.tree.leaves(got.params), jax.tree.leaves(state.params), strict=True):
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
                np.testing.assert_array_equal(a.data, b.data)
        with pytest.raises(CheckpointError, match=r"^step is only this process's: save a state"):
            checkpointer.save(5, state.replace(step=jnp.asarray(5)))
    with (
        Checkpointer(folder, zero, read_only=True) as checkpointer,
        pytest.raises(CheckpointError, match="was opened with read_only=True"),
    ):
        checkpointer.save(6, state)
