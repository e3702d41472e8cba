"""Processes that are one job, each a program of its own, as a launcher starts them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from zerojax.launch.job import free_port

TESTS = Path(__file__).parent
LIMIT = 600.0  # s that a test waits at most, which a machine of any load stays below


def join(process: int, count: int, port: int) -> None:
    """Makes this process one of several, with a CPU device each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=300)


@contextmanager
def group(
    script: Path, count: int, folder: Path, *arguments: Any, **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts ``script PROCESS COUNT PORT FOLDER ARGUMENTS...`` as often; none outlives the block.

    What they print goes to ``FOLDER/output.PROCESS``.
    """
    port = free_port()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(count):
            command = [sys.executable, script, process, count, port, folder, *arguments]
            with open(folder / f"output.{process}", "wb") as output:
                begun.append(
                    subprocess.Popen(
                        [*map(str, command)],
                        env={**os.environ, "PYTHONPATH": path, **environment},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield begun
    finally:
        for each in begun:
            each.kill()
            each.wait()


def wait_for(condition: Callable[[], bool], told: Callable[[], str]) -> None:
    """Returns when a condition holds; AssertionError with what ``told`` tells after ``LIMIT``."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, told()
        time.sleep(0.02)
