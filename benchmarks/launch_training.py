"""A short training run for the launchers: saves when preempted, goes on, ends with a checksum.

    python -m zerojax launch --nproc-per-node 2 -m benchmarks.launch_training FOLDER

Losses and checksum are the same however often the run was stopped. A process that gets SIGUSR1
raises after its step, one that gets SIGUSR2 calls ``sys.exit(3)``. The state has one of the
``FORMS``.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import PREEMPTED, Checkpointer, Preemption, state_tree

ROWS = 64
HIDDEN = 16384  # above the threshold from which stage 3 shards a parameter
FORMS = ("TrainState", "NNX", "pair", "accumulated in bfloat16")
MODEL, TX = nn.Sequential([nn.Dense(HIDDEN), nn.relu, nn.Dense(8)]), optax.adam(1e-3)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner, self.outer = nnx.Linear(16, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.relu(self.inner(x)))


def linen_params(key: jax.Array) -> Any:
    return MODEL.init(key, jnp.zeros((1, 16)))["params"]


def create_train_state(key: jax.Array) -> TrainState:
    return TrainState.create(apply_fn=MODEL.apply, params=linen_params(key), tx=TX)


def create_pair(key: jax.Array) -> Any:
    params = linen_params(key)
    return params, TX.init(params)


def create_nnx(key: jax.Array) -> Any:
    model = Network(nnx.Rngs(key))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


def linen_loss(params: Any, batch: dict[str, Any]) -> jax.Array:
    logits: Any = MODEL.apply({"params": params}, batch["x"])
    return loss_of(logits, batch["y"])


def step_of_train_state(state: TrainState, batch: dict[str, Any]) -> Any:
    loss, grads = jax.value_and_grad(linen_loss)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def step_of_pair(params: Any, opt_state: Any, batch: dict[str, Any]) -> Any:
    loss, grads = jax.value_and_grad(linen_loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def step_of_nnx(model: Network, optimizer: nnx.Optimizer[Network], batch: dict[str, Any]) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: loss_of(m(batch["x"]), batch["y"]))(model)
    optimizer.update(model, grads)
    return loss


def trained(step: Any, state: Any, batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    """Returns the state after a step of any form, and the loss."""
    if isinstance(state, TrainState):
        return step(state, batch)
    if isinstance(state[0], nnx.Module):
        return state, step(*state, batch)
    *state, loss = step(*state, batch)
    return tuple(state), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between steps")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0])
    args = parser.parse_args()

    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: asked.append(number))
    zerojax.init_distributed()
    in_bfloat16 = args.form == FORMS[-1]
    zero = zerojax.zero(stage=3, bf16=in_bfloat16, gradient_accumulation_steps=1 + in_bfloat16)
    me = jax.process_index()
    print(f"pid {os.getpid()} is process {me} of {jax.process_count()}", flush=True)
    create_state, step_of = {
        "NNX": (create_nnx, step_of_nnx),
        "pair": (create_pair, step_of_pair),
    }.get(args.form, (create_train_state, step_of_train_state))
    train_step = zero(step_of)

    key = jax.random.key(0)
    with Preemption() as preemption, Checkpointer(args.folder, zero, keep=2) as checkpointer:
        done = checkpointer.latest_step() or 0
        if done:
            state = checkpointer.restore(zero.abstract_state(create_state, key))
        else:
            state = zero.init(create_state, key)
        print(f"begins after step {done}", flush=True)
        for step in range(done + 1, args.steps + 1):
            x = np.random.default_rng(step).normal(size=(ROWS, 16)).astype(np.float32)
            own = x[zerojax.process_rows(ROWS)]
            batch = {"x": own, "y": own[:, :8].argmax(axis=-1)}
            state, loss = trained(train_step, state, batch)
            print(f"step {step} loss {float(loss):.9g}", flush=True)  # of float32: the very bits
            if signal.SIGUSR1 in asked:
                raise RuntimeError("asked to fail")
            if signal.SIGUSR2 in asked:
                sys.exit(3)
            stop = preemption.notice
            if step % args.every == 0 or stop:
                checkpointer.save(step, state)
            if stop:
                checkpointer.wait()
                print(f"saved step {step}, preempted", flush=True)
                sys.exit(PREEMPTED)
            time.sleep(args.pause)
    gather = jax.jit(lambda tree: tree, out_shardings=jax.NamedSharding(zero.mesh, jax.P()))
    arrays = gather(dict(sorted(state_tree.arrays_by_name(state).items())))
    leaves = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(arrays))
    print(f"end: {hashlib.sha256(leaves).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
