"""A launch whose processes are one job of JAX's."""

import signal
from pathlib import Path

from launch.launched import launched, launching, living

SCRIPT = """
import zerojax
zerojax.init_distributed()
import jax
from jax.experimental import multihost_utils
say("sum", multihost_utils.process_allgather(jax.numpy.ones(1) * jax.process_index()).sum())
"""


def test_processes_join_fail_and_start_again(tmp_path: Path) -> None:
    script = SCRIPT + """
if me == 1 and sys.argv[1:] != ["again"] and not os.path.exists("failed"):
    open("failed", "w").close()
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


def test_sigterm_ends_processes_that_ignore_it_by_jax(tmp_path: Path) -> None:
    """JAX takes SIGTERM for its own notice, and goes on."""
    script = SCRIPT + "say('ready', os.getpid())\ntime.sleep(120)"
    with launching(tmp_path, script, "--nproc-per-node=2", "--grace=1") as launch:
        pids = launch.pids(2, "ready")
        launch.send(signal.SIGTERM)
        told = launch.told()
    assert told.status in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    assert told.seconds < 10
    assert not living(pids)
