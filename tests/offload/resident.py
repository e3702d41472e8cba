"""Trains a model whose state lies on disk, and tells how much memory that takes.

    python tests/offload/resident.py NVME_PATH MILLIONS

Prints a JSON object: bytes of the state on disk, the most resident memory beyond what the process
had before the state was made, and the bound for it. The bound is what README states: the
gradients, ``max_in_cpu`` parameters, three sub-groups, the buffers, and 0.15 GB for XLA's programs;
on CPU devices what lies in host memory counts three times.
"""

import json
import os
import sys
import threading
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

WIDTH, LAYERS, SUB_GROUP, BUFFERS = 1024, 10, 2**19, 2
IN_CPU = LAYERS * WIDTH * WIDTH  # elements: one stack
# Of one element: master and moments; the copy to compute with; the gradient.
MASTER_AND_MOMENTS, COPY, GRADIENT = 12, 2, 2
PROGRAMS = 150_000_000  # XLA's code and temporaries, threads, the allocator


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident memory, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = resident()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.005)


def bound(parameters: int) -> int:
    """Bytes that may be resident beyond those of an idle process."""
    sub_groups = 3 * SUB_GROUP * (MASTER_AND_MOMENTS + COPY + GRADIENT)
    # Both ways, half a sub-group of one array each; and layers that the step reads ahead.
    buffers = 2 * BUFFERS * SUB_GROUP // 2 * 4 + BUFFERS * WIDTH * WIDTH * COPY
    # XLA for CPU, whose devices' memory is the host's, copies what a loop reads of host memory, and
    # what it puts there: two more of each.
    in_cpu = 3 * COPY * IN_CPU
    return GRADIENT * parameters + in_cpu + sub_groups + buffers + PROGRAMS


def main(nvme_path: str, millions: int) -> None:
    stacks = max(1, millions // LAYERS)  # layers are of a million parameters each

    def create_state(key: jax.Array) -> TrainState:
        keys = jax.random.split(key, stacks)
        params = {
            f"stack_{i}": jax.random.normal(keys[i], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
            for i in range(stacks)
        }
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-4))

    nvme = {"device": "nvme", "nvme_path": nvme_path, "buffer_count": BUFFERS}
    zero = zerojax.zero(
        stage=3,
        bf16=True,
        mesh=zerojax.mesh(1),
        offload_optimizer=nvme,
        offload_param={**nvme, "max_in_cpu": IN_CPU},
        sub_group_size=SUB_GROUP,
    )

    @zero
    def train_step(state, batch):
        def loss(params):
            @jax.checkpoint
            def layer(x, w):
                return jnp.tanh(x @ w), None

            x = batch
            for i in range(stacks):
                x, _ = jax.lax.scan(layer, x, params[f"stack_{i}"])
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    batch = np.ones((8, WIDTH), jnp.bfloat16)
    jnp.ones(4).block_until_ready()
    before, peak = resident(), Peak()
    state = zero.init(create_state, jax.random.key(0))
    made, peak.bytes = peak.bytes - before, resident()
    losses = []
    for _ in range(2):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    plan = zero.plan(state)
    print(
        json.dumps(
            {
                "losses": losses,
                "state": plan.bytes_in("disk"),
                "bound": bound(stacks * LAYERS * WIDTH * WIDTH),
                "birth": made,
                "peak": peak.bytes - before,
                "before": before,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
