"""Faults of launched training: all end, nothing saved is lost, and the rest is bit for bit."""

import os
import signal
from pathlib import Path

import pytest
from groups import LIMIT

from benchmarks.supervised import Training, began_after, checksum, losses


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes compile, they compile soon."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    with Training(tmp_path, "run", *options, count=2, steps=30, pause=0.3) as training:
        training.output.wait("step 7 (loss)", 2)
        os.kill(training.processes()[1].pid, signal.SIGKILL)
        assert training.launcher.wait(LIMIT) == 0, training.output.text()
        killed, following = training.attempts()
    saved = began_after(following)
    assert saved in range(5, 30, 5)  # 5, unless the test itself had no turn for a second
    assert checksum(following)
    again = losses(following)
    assert [*again] == [*range(saved + 1, 31)]
    assert {6, 7} <= losses(killed).keys()
    assert all(again[step] == loss for step, loss in losses(killed).items() if step > saved)
