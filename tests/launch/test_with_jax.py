"""A launch whose processes are one job of JAX's."""

import re
import signal
import sys
from pathlib import Path

import pytest
from launch.launched import launched

pytestmark = pytest.mark.slow

SCRIPT = """
import zerojax
zerojax.init_distributed()
import jax
from jax.experimental import multihost_utils
say("sum", multihost_utils.process_allgather(jax.numpy.ones(1) * jax.process_index()).sum())
"""


def test_processes_join_fail_and_start_again(tmp_path: Path) -> None:
    script = SCRIPT + """
if me == 0: open("said", "w").close()
if me == 1 and not os.path.exists("failed"):
    open("failed", "w").close()
    until("said")  # the launcher ends process 0 soon
    raise ValueError("lost")
multihost_utils.sync_global_devices("end")
"""  # fmt: skip
    told = launched(tmp_path, script, "--nproc-per-node=2", "--max-restarts=1")
    assert told.status == 0, told.err
    assert told.out.count("sum 1.0") == 4
    shown = told.err.partition("zerojax launch: ")[2].partition("zerojax launch: ")
    assert shown[0].startswith("process 1 failed first: status 1\n[1] Traceback")
    assert shown[0].endswith("[1] ValueError: lost\n")
    again = "attempt 2 of 2, because process 1 failed first: status 1\n"
    assert shown[2].startswith(again)


TRAIN = """
import zerojax
zerojax.init_distributed()
import jax, jax.numpy as jnp, numpy as np

zero = zerojax.zero(stage=2)

def create_state():
    return {"w": jnp.ones((8, 4))}

@zero
def train_step(params, batch):
    loss, grads = zerojax.value_and_grad(lambda p: (batch @ p["w"]).mean())(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss

state = zero.init(create_state)
batch = np.ones((2, 8), np.float32)
for number in range(3):
    state, loss = train_step(state, batch)
loss.block_until_ready()
"""


def test_one_whose_script_ends_early(tmp_path: Path) -> None:
    script = TRAIN + "while me == 0: state, _ = train_step(state, batch)"
    told = launched(tmp_path, script, "--nproc-per-node=2")
    assert told.status == 1, told.err
    assert re.search(r"call 6 of zerojax is .*the end of the program in process 1", told.err)


starts_threads = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no threads at its end"
)
UNFINISHED = """
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.pending import PendingSave
finish = PendingSave.finish
PendingSave.finish = lambda *args: (time.sleep(1), finish(*args))
Checkpointer("steps", zero).save(3, state)
"""


@starts_threads
def test_a_save_under_way_is_finished(tmp_path: Path) -> None:
    script = TRAIN + UNFINISHED + "sys.exit(75)"
    told = launched(tmp_path, script, "--nproc-per-node=2", "--watchdog=off")
    assert told.status == 75, told.err
    assert (tmp_path / "steps/3/zerojax.json").exists()


def test_one_that_is_stopped(tmp_path: Path) -> None:
    """JAX misses its heartbeat, long before the watchdog's limit; the stacks are shown."""
    script = TRAIN.replace("init_distributed()", "init_distributed(heartbeat=15)")
    script += """
if me == 1: os.kill(os.getpid(), signal.SIGSTOP)
while True: state, _ = train_step(state, batch)
"""
    told = launched(tmp_path, script, "--nproc-per-node=2")
    assert told.status == 128 + signal.SIGABRT, told.err
    assert "stopped sending heartbeats):\n[0] 1\n" in told.err
    assert "[0] Fatal Python error: Aborted\n" in told.err
    assert 'script.py"' in told.err.partition("Fatal Python error")[2]
