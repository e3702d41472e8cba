"""Trains with its state on a disk, saves after step 2, and dies while step 3 is being written."""

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]


def main(folder: str, nvme: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    from offload.training import BATCH, create, train_step, zero_for
    from offload.watched_store import WatchedStore

    from zerojax.checkpoint import Checkpointer

    left: list[int] = []

    def event(kind: str, key: str) -> None:
        if left and kind == "write issued":
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    zero = zero_for(nvme)
    zero.states.placer.store = WatchedStore(nvme, event)
    step, state = zero(train_step), zero.init(create)
    with Checkpointer(folder, zero) as checkpointer:
        for i in range(1, 3):
            state, _ = step(state, BATCH)
            if i == 1:
                print("begun", flush=True)
        checkpointer.save(2, state)
        checkpointer.wait()
        print("saved", flush=True)
        left.append(5)
        step(state, BATCH)
        print("alive", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
