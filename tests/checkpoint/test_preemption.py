"""SIGTERM to real processes of one job: one step for all, wherever the signal came first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint import preempted
from groups import wait_for
from processes import ends, group

import zerojax
from zerojax.checkpoint import PREEMPTED, Checkpointer, Preemption

pytestmark = pytest.mark.slow

COUNT = 3
# Who gets the signal, and how many ms later the next: by turn.
SIGNALS = [[(1, 0)], [(2, 70), (0, 0)], [(1, 0)], [(2, 50), (1, 50), (0, 0)]]


def test_all_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    assert len(SIGNALS) == preempted.TURNS

    def told() -> str:
        return "\n\n".join(file.read_text() for file in sorted(tmp_path.glob("output.*")))

    with group(preempted.train, COUNT, tmp_path) as processes:
        for turn, signals in enumerate(SIGNALS):
            ready = [tmp_path / f"ready.{turn}.{i}" for i in range(COUNT)]
            wait_for(lambda ready=ready: all(file.exists() for file in ready), told)
            for process, milliseconds in signals:
                pid = processes[process].pid
                assert pid is not None
                os.kill(pid, signal.SIGTERM)
                time.sleep(milliseconds / 1000)
            (tmp_path / f"sent.{turn}").touch()
        assert ends(processes) == [PREEMPTED] * COUNT, told()

    steps = []
    for turn in range(preempted.TURNS):
        stopped = {(tmp_path / f"stopped.{turn}.{i}").read_text() for i in range(COUNT)}
        assert len(stopped) == 1, (turn, stopped)
        if turn != preempted.EVALUATES:
            steps.append(int(stopped.pop().split()[1]))
    zero = zerojax.zero(stage=3)
    with Checkpointer(tmp_path / "checkpoints", zero, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == steps
        for step in steps:
            params = checkpointer.restore(zero.abstract_state(preempted.create).params, step)
            np.testing.assert_array_equal(params["w"], step)


def test_the_only_process_notes_its_own_signal() -> None:
    assert jax.process_count() == 1
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.notice
        signal.raise_signal(signal.SIGTERM)
        assert preemption.notice
        assert preemption.notice
        signal.raise_signal(signal.SIGTERM)  # the same notice, by another way
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_later_signal_ends_the_process() -> None:
    script = (
        "import os, signal, time; from zerojax.checkpoint import Preemption\n"
        "with Preemption(same_notice=0.1):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(3600)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGTERM
