"""A short training run for the launchers: saves when preempted, goes on, ends with a checksum.

    python -m zerojax launch --nproc-per-node 2 -m benchmarks.launch_training FOLDER

Losses and checksum are the same however often the run was stopped. A process that gets SIGUSR1
raises after its step, one that gets SIGUSR2 calls ``sys.exit(3)``.
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
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import PREEMPTED, Checkpointer, Preemption

ROWS = 64
HIDDEN = 16384  # above the threshold from which stage 3 shards a parameter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between steps")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    args = parser.parse_args()

    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: asked.append(number))
    zerojax.init_distributed()
    zero = zerojax.zero(stage=3)
    me = jax.process_index()
    print(f"pid {os.getpid()} is process {me} of {jax.process_count()}", flush=True)
    model = nn.Sequential([nn.Dense(HIDDEN), nn.relu, nn.Dense(8)])

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 16)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    @zero
    def train_step(
        state: TrainState, batch: dict[str, Any]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: object) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

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
            state, metrics = train_step(state, {"x": own, "y": own[:, :8].argmax(axis=-1)})
            loss = float(metrics["loss"])
            print(f"step {step} loss {loss:.9g}", flush=True)  # of float32: the very bits
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
    parameters = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(gather(state.params)))
    print(f"end: {hashlib.sha256(parameters).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
