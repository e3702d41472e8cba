"""A launch as a user types it, of scripts that do without JAX."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from groups import LIMIT

ROOT = Path(__file__).parents[2]

# What init_distributed does for the launcher, and words that the scripts below share.
HEAD = """
import atexit, os, signal, subprocess, sys, time
def until(path):
    while not os.path.exists(path):
        time.sleep(0.02)
me = int(os.environ["ZEROJAX_PROCESS_ID"])
run_dir = os.environ["ZEROJAX_RUN_DIR"]
open(f"{run_dir}/joined.{me}", "w").close()
atexit.register(lambda: open(f"{run_dir}/ended.{me}", "w").close())
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
say("pid", os.getpid())
"""


class Told(NamedTuple):
    """What a launch that ended said, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float


# The launcher leaves processes that another one's failure or Ctrl-C ends all the time they take.
PATIENT = """
import functools
from zerojax.launch import local
local.Group = functools.partial(local.Group, ending=3600.0)
"""


def command(patch: str = "") -> list[str]:
    """The words of a launch; ``patch`` is run in the launcher before."""
    if not patch:
        return [sys.executable, "-m", "zerojax", "launch"]
    return [sys.executable, "-c", f"{patch}\nfrom zerojax.__main__ import main\nmain()", "launch"]


LEFT_OUT = "ZEROJAX", "CUDA_", "OMPI_", "XLA_PYTHON_CLIENT_"


def environment(**more: str) -> dict[str, str]:
    """That of the tests, without what another launch or a GPU would tell."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


class Launch:
    """A launch that runs."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: object,
        on: tuple[object, ...] = (),
        patch: str = "",
        **more: str,
    ) -> None:
        """Starts it; the file "in" of the folder, if any, is its standard input.

        Args:
          folder: Where.
          script: What follows ``HEAD``.
          options: Of the launch.
          on: Words before the command.
          patch: See ``command``.
          more: Variables of the environment; ``args``: arguments of the script.
        """
        path = folder / "script.py"
        path.write_text(HEAD + script)
        words = [*map(str, options), str(path), *more.pop("args", "").split()]
        self.out, self.err = folder / "out", folder / "err"
        self.started = time.monotonic()
        given = folder / "in"
        given.touch()
        with given.open("rb") as stdin, self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*map(str, on), *command(patch), *words],
                cwd=folder,
                env=environment(TMPDIR=str(folder), **more),
                stdin=stdin,
                stdout=out,
                stderr=err,
            )

    def pids(self, count: int, word: str = "pid") -> list[int]:
        """Ids that ``count`` processes said after a word, in the order of the processes."""
        until, ended = time.monotonic() + LIMIT, False
        while time.monotonic() < until and not ended:
            ended = self.process.poll() is not None
            found = re.findall(rf"^\[(\d+)\] {word} (\d+)$", self.out.read_text(), re.MULTILINE)
            if len(found) >= count:
                return [int(pid) for _, pid in sorted(found, key=lambda each: int(each[0]))]
            time.sleep(0.02)
        raise TimeoutError(self.out.read_text() + self.err.read_text())

    def send(self, number: signal.Signals) -> None:
        """A signal for the launcher; its time counts from here."""
        self.started = time.monotonic()
        self.process.send_signal(number)

    def told(self) -> Told:
        """Waits for the end."""
        status = self.process.wait(LIMIT)
        seconds = time.monotonic() - self.started
        out, err = (path.read_text(errors="replace") for path in (self.out, self.err))
        return Told(status, out, err, seconds)


@contextmanager
def launching(folder: Path, script: str, *options: object, **more: Any) -> Iterator[Launch]:
    """A launch that runs, and is killed at the end of a test that fails."""
    launch = Launch(folder, script, *options, **more)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.wait()


def launched(folder: Path, script: str, *options: object, **more: str) -> Told:
    """A launch that has ended."""
    with launching(folder, script, *options, **more) as launch:
        return launch.told()


def living(pids: list[int]) -> list[int]:
    """Which of these processes are alive."""
    return [pid for pid in pids if is_alive(pid)]


def left_behind(pids: list[int]) -> list[int]:
    """Which of these processes do not end."""
    until = time.monotonic() + LIMIT
    while True:
        left = living(pids)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state(pid: int) -> str:
    """The state of a process, as ``T`` for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
