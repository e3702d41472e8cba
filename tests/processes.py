"""Several processes that are one job of JAX's, on the CPU.

A fork server that has imported JAX and zerojax starts them, as each import takes seconds.
"""

import atexit
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import jax
import pytest
from groups import LIMIT
from tiers import cpu_seconds

from zerojax.launch.job import free_port

STALL = "--xla_cpu_collective_timeout_seconds=240"


def fork_server() -> ForkServerContext:
    """Returns the context whose processes have imported ``preloaded``; starts its server once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        # What the processes free goes back to the system at once: their peak is of what they held.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "500000")
        # The server finds modules by this variable alone.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Gives this process the variables of the one that asked for it, and JAX what follows."""
    os.environ.clear()
    os.environ.update(environment)
    # A stall ends after minutes, not after XLA's half an hour.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {STALL}"
    quick = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", quick)


def join(process: int, count: int, port: int, devices: int) -> None:
    """Makes this process one of several, with so many devices each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=300)


def joined(
    task: Callable[..., Any],
    process: int,
    count: int,
    port: int,
    environment: Mapping[str, str],
    *arguments: Any,
) -> tuple[Any, float]:
    """Runs ``task`` as one of several processes, which share eight devices.

    Returns:
      What the task returned, and the CPU seconds that this process used.
    """
    begin = cpu_seconds()
    take_environment(environment)
    join(process, count, port, 8 // count)
    try:
        result = task(process, *arguments)
    finally:
        jax.distributed.shutdown()
    return result, cpu_seconds() - begin


@contextmanager
def group(
    program: Callable[..., None], count: int, folder: Path, *arguments: Any, **environment: str
) -> Iterator[list[ForkServerProcess]]:
    """Starts ``program(PROCESS, FOLDER, ARGUMENTS...)`` in so many with a device each; none
    outlives the block.

    What they print goes to ``FOLDER/output.PROCESS``.
    """
    port, variables = free_port(), {**os.environ, **environment}
    begun = [
        fork_server().Process(
            target=printing, args=(program, i, count, port, variables, folder, *arguments)
        )
        for i in range(count)
    ]
    try:
        for each in begun:
            each.start()
        yield begun
    finally:
        for each in begun:
            each.kill()
            each.join()


def ends(processes: Sequence[ForkServerProcess]) -> list[int | None]:
    """Waits for the end of each; returns their statuses, a signal's with a minus."""
    for each in processes:
        each.join(LIMIT)
    return [each.exitcode for each in processes]


def printing(
    program: Callable[..., None],
    process: int,
    count: int,
    port: int,
    environment: Mapping[str, str],
    folder: Path,
    *arguments: Any,
) -> None:
    """Runs ``program`` as one of several processes, what it prints in a file."""
    output = os.open(folder / f"output.{process}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    take_environment(environment)
    if count > 1:
        join(process, count, port, 1)
    try:
        program(process, folder, *arguments)
    finally:
        atexit._run_exitfuncs()  # as a script does, and a process of multiprocessing does not
