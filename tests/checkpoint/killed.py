"""A training process that saves after every step, to be killed at any moment.

Its log, a line for each event: `resumed STEP DIGEST`, `step STEP DIGEST`, `saved STEP`.
"""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer, state_tree

STEPS = 40


class KeyedState(TrainState):
    key: jax.Array


def create(key: jax.Array) -> KeyedState:
    params = {name: jax.random.normal(key, (64, 64)) for name in "abc"}
    return KeyedState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2), key=key)


def digest(state: KeyedState) -> str:
    """Of every leaf, the moments among them."""
    text = hashlib.sha256()
    for name, x in sorted(state_tree.arrays_by_name(state).items()):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        text.update(name.encode() + np.asarray(x).tobytes())
    return text.hexdigest()[:16]


def train(folder: pathlib.Path, log: pathlib.Path, cache: pathlib.Path) -> None:
    """The whole run, or what is left of it."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    first_key = jax.random.key(0)
    zero = zerojax.zero(stage=3, fp16=True, stage3_param_persistence_threshold=0)

    @zero
    def step(state: KeyedState, x: jax.Array) -> tuple[KeyedState, None]:
        key, noise = jax.random.split(state.key)

        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            y = x @ params["a"] @ params["b"] @ params["c"]
            y = y + jax.random.normal(noise, y.shape, y.dtype)
            return (y.astype(jnp.float32) ** 2).mean()

        grads = zerojax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads).replace(key=key), None

    with log.open("a", buffering=1) as told, Checkpointer(folder, zero, keep=2) as checkpointer:
        done = checkpointer.latest_step() or 0
        if done:
            state = checkpointer.restore(zero.abstract_state(create, first_key))
            assert checkpointer.extra() == {"next": done}
        else:
            state = zero.init(create, first_key)
        told.write(f"resumed {done} {digest(state)}\n")
        for i in range(done, STEPS):
            batch = np.random.default_rng(i).normal(size=(4, 64)).astype(np.float16)
            state, _ = step(state, batch)
            told.write(f"step {i + 1} {digest(state)}\n")
            checkpointer.save(i + 1, state, extra={"next": i + 1})
            if i > done:
                told.write(f"saved {i}\n")
        checkpointer.wait()
        told.write(f"saved {STEPS}\n")
