"""Real processes that stand still, for a reason or without one."""

import os
import signal
from pathlib import Path

import jax.numpy as jnp
import pytest
from distributed import stalled
from groups import wait_for
from processes import ends, group

from zerojax.distributed.coordinator import Coordinator, coordinator
from zerojax.distributed.watchdog import STALLED, Watchdog, watchdog

pytestmark = pytest.mark.slow


def told(folder: Path) -> str:
    return "\n\n".join(file.read_text() for file in sorted(folder.glob("output.*")))


@pytest.mark.parametrize(
    ("count", "stopped"), [(3, 2), pytest.param(2, 0, marks=pytest.mark.sweep)]
)
def test_a_stopped_process_ends_the_others(tmp_path: Path, count: int, stopped: int) -> None:
    """A long compile of one process, for which the others wait in a collective, does not."""
    environment = {"ZEROJAX_WATCHDOG": str(stalled.LIMIT), "ZEROJAX_RUN_DIR": str(tmp_path)}
    with group(stalled.train, count, tmp_path, **environment) as processes:
        up = [tmp_path / f"up.{i}" for i in range(count)]
        wait_for(lambda: all(file.exists() for file in up), lambda: told(tmp_path))
        stop = processes[stopped].pid
        assert stop is not None
        os.kill(stop, signal.SIGSTOP)
        others = [i for i in range(count) if i != stopped]
        assert ends([processes[i] for i in others]) == [STALLED] * len(others)
    who = "No sign of life from process 2." if stopped else "Process 0, the coordinator, does not"
    assert sorted(tmp_path.glob("stacks.*")) == [tmp_path / f"stacks.{i}" for i in others]
    for i in others:
        stacks = (tmp_path / f"stacks.{i}").read_text()
        assert who in stacks
        assert f"This is process {i}; status 76." in stacks
        assert "stalled.py" in stacks
        assert "in train" in stacks
        assert "in train" in (tmp_path / f"output.{i}").read_text()


def test_a_process_that_never_comes_to_its_step(tmp_path: Path) -> None:
    environment = {"ZEROJAX_WATCHDOG": str(stalled.LIMIT), "ZEROJAX_RUN_DIR": str(tmp_path)}
    with group(stalled.train, 2, tmp_path, True, **environment) as processes:
        assert ends(processes) == [STALLED] * 2, told(tmp_path)
    stacks = [(tmp_path / f"stacks.{i}").read_text() for i in range(2)]
    assert all("All 2 processes are alive." in text for text in stacks)
    assert ["in loader_without_data" in text for text in stacks] == [False, True]


def test_a_debugger_a_pause_and_a_compile_are_no_stall(tmp_path: Path) -> None:
    environment = {"ZEROJAX_WATCHDOG": str(stalled.LIMIT_ALONE), "ZEROJAX_RUN_DIR": str(tmp_path)}
    with group(stalled.alone, 1, tmp_path, **environment) as processes:
        assert ends(processes) == [STALLED], told(tmp_path)
    for done in ("debugged", "paused", "compiled"):
        assert (tmp_path / done).exists(), told(tmp_path)
    stacks = (tmp_path / "stacks.0").read_text()
    assert "in loader_without_data" in stacks
    assert f"ZEROJAX_WATCHDOG is {stalled.LIMIT_ALONE:g} s" in stacks


def test_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROJAX_WATCHDOG", raising=False)
    assert watchdog() is None  # the only process
    monkeypatch.setenv("ZEROJAX_WATCHDOG", "off")
    assert watchdog() is None
    for wrong in ("soon", "0", "-3", "nan", "inf"):
        monkeypatch.setenv("ZEROJAX_WATCHDOG", wrong)
        with pytest.raises(ValueError, match=f"^ZEROJAX_WATCHDOG={wrong}: set seconds above 0"):
            watchdog()
    monkeypatch.setenv("ZEROJAX_WATCHDOG", "1000")
    there = watchdog()
    assert there is not None
    assert watchdog() is there
    thread = coordinator()
    thread.leave()
    assert not thread.is_alive()


def test_the_limit_follows_the_pace_of_steps() -> None:
    waits = Watchdog(Coordinator(), None, None)
    assert waits.limit() == 1800
    waits.begin()
    assert waits.limit() == 1800
    for _ in range(3):
        waits.ran((jnp.ones(()), jnp.ones(3)))
        waits.take_results()
    assert waits.limit() == 300
